"""Registration of rollout servers with an SGLang router (`router_url`)."""
