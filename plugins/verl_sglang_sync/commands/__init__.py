"""The command line and its commands. Nothing else of the package imports this folder."""
