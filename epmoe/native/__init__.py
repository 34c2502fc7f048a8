"""The native library: its build, its operators, and the arguments and formats that they take."""
