"""What SGLang calls: one module for each kind of request, and `upstream` for its internals."""
