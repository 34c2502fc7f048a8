"""Host frameworks, a module for each, which registers epmoe with its framework."""
