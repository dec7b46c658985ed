"""The recipes; ``minifloat.recipe`` lists their names."""
