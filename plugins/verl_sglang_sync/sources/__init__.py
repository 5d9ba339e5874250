"""Sources of the bytes: the export, and the parameters that it is made from."""
