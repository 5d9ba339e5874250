"""What SGLang calls: one module for each kind of request."""
