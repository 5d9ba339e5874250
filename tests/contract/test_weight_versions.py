"""Our client under verl's own: what it tells of parts, and that verl's trainers are given it."""

import asyncio
import pickle
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf
from verl.workers.rollout import llm_server
from verl.workers.rollout.replica import TokenOutput

from verl_sglang_sync.verl.weight_versions import WeightVersionsClient, report_weight_versions

CONFIG = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "sglang"}}})


def response_of(parts, monkeypatch):
    """What the client answers if syncs cut a rollout into `(num_tokens, global_steps)`."""
    left, prompts = list(parts), []

    async def generate(*, prompt_ids, **kwargs):
        assert kwargs.keys() == {"request_id", "sampling_params", "image_data", "video_data"}
        prompts.append(len(prompt_ids))
        num_tokens, version = left.pop(0)
        return TokenOutput(
            token_ids=[7] * num_tokens,
            log_probs=[-1.0] * num_tokens,
            stop_reason="abort" if left else "stop",
            extra_fields={"global_steps": version},
        )

    async def acquire(self, request_id, **extra):
        return "server", SimpleNamespace(generate=SimpleNamespace(remote=generate))

    async def no_sleep(delay): ...

    monkeypatch.setattr(llm_server.LLMServerClient, "_acquire_server", acquire)
    monkeypatch.setattr(llm_server.LLMServerClient, "_release_server", lambda *_, **__: None)
    monkeypatch.setattr(llm_server.asyncio, "sleep", no_sleep)
    client = WeightVersionsClient(CONFIG)
    request = client.generate(request_id="a", prompt_ids=[1, 2], sampling_params={})
    response = asyncio.run(request)
    assert prompts == [2 + sum(num for num, _ in parts[:index]) for index in range(len(parts))]
    assert len(response.token_ids) == sum(num for num, _ in parts)
    return response


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ([(5, 3)], [[5, 3]]),
        ([(2, 3), (4, 4), (1, 6)], [[2, 3], [4, 4], [1, 6]]),
        ([(2, 3), (0, 4), (1, 5)], [[2, 3], [1, 5]]),
        ([(0, 3), (3, 4)], [[3, 4]]),
        ([(2, 3), (1, 3), (0, 3)], [[3, 3]]),
        ([(0, 3)], []),
    ],
)
def test_each_part_is_told_with_its_version(parts, told, monkeypatch):
    response = response_of(parts, monkeypatch)
    assert response.extra_fields["weight_versions"] == told
    assert response.extra_fields["min_global_steps"] == parts[0][1], "as verl tells them"
    assert response.extra_fields["max_global_steps"] == parts[-1][1]


def test_verls_asynchronous_client_becomes_ours_and_no_other(monkeypatch):
    class Users(llm_server.FullyAsyncLLMServerClient):
        pass

    get_client = llm_server.LLMServerManager.get_client
    original = getattr(get_client, "__wrapped__", get_client)
    monkeypatch.setattr(llm_server.LLMServerManager, "get_client", original)
    manager = object.__new__(llm_server.LLMServerManager)
    manager.config, manager.global_load_balancer = CONFIG, None
    asynchronous = llm_server.FullyAsyncLLMServerClient
    assert type(manager.get_client(client_cls=asynchronous)) is asynchronous
    for _ in range(2):
        report_weight_versions()
    client = manager.get_client(client_cls=asynchronous, only_hybrid=True)
    arrived = pickle.loads(pickle.dumps(client))
    assert type(arrived) is WeightVersionsClient and arrived._only_hybrid
    assert type(manager.get_client()) is llm_server.LLMServerClient
    assert type(manager.get_client(client_cls=Users)) is Users
