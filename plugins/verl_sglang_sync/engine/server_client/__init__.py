"""HTTP client of an SGLang server's control endpoints, for any thread and any event loop.

client = SGLangServerClient("http://[::1]:30000", timeout_s=600)
client.run(operations.release_memory(["kv_cache", "weights"]))
future = client.submit(operations.model_info())
"""
