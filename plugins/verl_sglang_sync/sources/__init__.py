"""Sources of the bytes: the export, and the parameters that an export is made from."""
