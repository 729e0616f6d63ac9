"""What to build: the recipe, the rules it must keep, its memory, and the commands it stands for."""
