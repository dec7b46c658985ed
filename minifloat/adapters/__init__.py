"""What other libraries load: each module imports one of them, which `minifloat` itself does not need."""
