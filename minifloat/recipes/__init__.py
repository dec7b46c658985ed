"""The recipes, one file each; ``minifloat.recipe`` lists their names."""
