"""Where bytes come from: the export, and the parameters behind it."""
