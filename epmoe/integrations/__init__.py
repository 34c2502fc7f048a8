"""Host frameworks, one file each; importing a file registers epmoe with its framework."""
