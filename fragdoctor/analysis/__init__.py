"""Pure functions over the columns of a snapshot."""
