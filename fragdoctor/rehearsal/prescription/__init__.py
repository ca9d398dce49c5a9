"""What it takes to make a program fit: changes, tried one after another in rehearsals."""
