"""verl's launch of a replica through our classes: every argument of SGLang's, every call of verl's.

Nothing is started: see `support.captured_launch`.
"""

import asyncio
from unittest import mock

import pytest
from tiny_assets import make_assets

from sglang_loader.common.engine_settings import GRAPHS_VARIABLE
from sglang_loader.common.session.messages import SESSION_FORMAT
from support.captured_launch import (
    HTTP_PORT,
    captured_launch,
    launch_replica,
)
from support.router import Router, serving
from unit.composed_recipe import ROLLOUT, SECTION, compose
from verl_sglang_sync.http_settings import KEY_VARIABLE
from verl_sglang_sync.verl.upstream import fields

# Every argument that does not reach SGLang as the recipe gives it, and why.
ALWAYS = {
    "custom_weight_loader": "the recipe's loaders stay, ours and verl's come after them",
    "enable_weights_cpu_backup": "verl switches it on for every hybrid replica; "
    "the mode of +weight_sync decides what a release really keeps",
}
WITH_TWO_NODES = {"dist_init_addr": "verl gives all nodes the address of the first"}
WITH_EVERYTHING = {
    **WITH_TWO_NODES,
    "served_model_name": "verl: rollout.prometheus.served_model_name",
    "enable_metrics": "verl: rollout.prometheus.enable",
    "enable_lora": "verl: a LoRA served as an adapter",
    "max_lora_rank": "verl: model.lora_rank",
    "lora_target_modules": "verl: model.target_modules",
    "enable_return_routed_experts": "verl: rollout.enable_rollout_routing_replay",
    "speculative_algorithm": "verl: rollout.mtp",
    "speculative_num_steps": "verl: rollout.mtp",
    "speculative_eagle_topk": "verl: rollout.mtp",
    "speculative_num_draft_tokens": "verl: rollout.mtp",
    "enable_draft_weights_cpu_backup": "verl: rollout.mtp",
}
OPTIONS = (
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.prometheus.enable=True",
    f"{ROLLOUT}.prometheus.served_model_name=served",
    f"{ROLLOUT}.enable_rollout_routing_replay=True",
    "actor_rollout_ref.model.mtp.enable=True",
    "actor_rollout_ref.model.mtp.enable_rollout=True",
    "actor_rollout_ref.model.lora_rank=8",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launch")
    make_assets(folder)
    return folder / "model"


def recipe_of(model, *overrides, num_hosts):
    return compose(
        "+weight_sync=flattened",
        f"actor_rollout_ref.model.path={model}",
        f"{ROLLOUT}.tensor_model_parallel_size={num_hosts}",
        *overrides,
    )


def launch(model, *overrides, arguments=None, hosts=("10.0.0.1",)):
    """Launch a replica of verl's recipe; `arguments` go in as `engine_kwargs.sglang`."""
    from omegaconf import OmegaConf

    recipe = recipe_of(model, *overrides, num_hosts=len(hosts))
    if arguments is not None:
        key = f"{ROLLOUT}.engine_kwargs.sglang"
        OmegaConf.update(recipe, key, arguments, merge=False, force_add=True)
    with captured_launch(hosts) as launched:
        asyncio.run(launch_replica(recipe, nnodes=len(hosts)))
    return launched


class TestArguments:
    @pytest.mark.parametrize(
        ("overrides", "hosts", "changed"),
        [
            ((), ("10.0.0.1",), ALWAYS),
            (OPTIONS, ("10.0.0.1", "10.0.0.2"), {**ALWAYS, **WITH_EVERYTHING}),
        ],
        ids=("plain", "everything that verl sets arguments for"),
    )
    def test_engine_kwargs_reach_sglang_untouched(self, model, overrides, hosts, changed):
        """All arguments at once; the list of those that do not arrive has none too many.

        Twice, with both values of a switch: one of them could be what verl sets anyway.
        """
        lost = set()
        for invert in (False, True):
            given = given_arguments(invert)
            for launched in launch(model, *overrides, arguments=given, hosts=hosts):
                reached = launched.arguments
                assert set(reached) == set(given)
                lost |= {name for name in given if reached[name] != given[name]}
                users = given["custom_weight_loader"]
                assert reached["custom_weight_loader"] == [*users, SESSION_FORMAT]
        assert lost == set(changed)

    def test_sleeping_graphs_are_captured_under_their_tag(self, model):
        (launched,) = launch(model, f"{SECTION}.release_cuda_graphs=true")
        assert launched.environment[GRAPHS_VARIABLE] == "true"
        assert GRAPHS_VARIABLE not in launch(model)[0].environment

    def test_without_engine_kwargs_nothing_of_them_arrives(self, model):
        """Negative control: each value above tells, and is the recipe's, not verl's own."""
        from sglang.srt.server_args import ServerArgs

        given = given_arguments()
        assert len(given) > 380
        defaults = {field.name: field.default for field in fields(ServerArgs)}
        assert [name for name, value in given.items() if value == defaults[name]] == []
        (only,) = launch(model)
        reached = only.arguments
        assert (reached["nnodes"], reached["dist_init_addr"]) == (1, None)
        assert only.http_servers == ["10.0.0.1"]
        assert reached["custom_weight_loader"] == [SESSION_FORMAT]
        same = {name for name in given if reached[name] == given[name]}
        switches = {name for name, value in given.items() if isinstance(value, bool)}
        assert len(same) < 10 and same <= switches, "verl switches few things itself"


def given_arguments(invert=False):
    """A value for each argument of `sglang.launch_server`: other than its default, one of a kind,
    with all that a recipe can say in it. Inverted, a switch has its other one.
    """
    from sglang.srt.server_args import ServerArgs

    given = {}
    for field in fields(ServerArgs):
        is_switch = isinstance(field.default, bool)
        given[field.name] = (
            field.default == invert if is_switch else [field.name, {"numbers": [7, 0.5]}]
        )
    return given | {"custom_weight_loader": ["users.own.loader"]}


class TestRouter:
    def launch_with(self, model, router, *overrides):
        """Launch a replica of two nodes beside a router; what the guards would watch."""
        watched = []
        hosts = ("fd00::1", "fd00::2")

        async def main():
            async with serving(router):
                url = f"{SECTION}.router_url='{router.url}'"
                recipe = recipe_of(model, url, *overrides, num_hosts=2)
                with (
                    captured_launch(hosts) as launched,
                    mock.patch("verl_sglang_sync.router.registration.start_guard", watched.append),
                ):
                    await launch_replica(recipe, nnodes=2)
                return launched

        return asyncio.run(main()), watched

    def test_the_replicas_one_server_joins_and_is_guarded(self, model, monkeypatch):
        monkeypatch.setenv(KEY_VARIABLE, "secret")
        router = Router(api_key="secret")
        _, watched = self.launch_with(
            model,
            router,
            f"+{ROLLOUT}.engine_kwargs.sglang.api_key=own",
        )
        url = f"http://[fd00::1]:{HTTP_PORT}"
        assert router.calls[0] == ("POST", "/workers", {"url": url, "api_key": "own"})
        assert list(router.workers.values()) == [url]
        (watch,) = watched
        assert (watch.router_url, watch.router_api_key) == (router.url, "secret")
        assert watch.worker.url == url and watch.worker.id in router.workers

    def test_a_router_that_refuses_ends_the_launch(self, model):
        from verl_sglang_sync.engine.server_client.errors import RouterError

        with pytest.raises(RouterError, match=r"did not add the server http://\[fd00::1\].*: no$"):
            self.launch_with(model, Router(failure="no"))

    def test_the_routers_health_checks_do_not_generate(self, model):
        from verl_sglang_sync.verl.replica import HEALTH_GENERATES

        with_router = self.launch_with(model, Router())[0][0].environment
        assert with_router[HEALTH_GENERATES] == "false"
        assert HEALTH_GENERATES not in launch(model)[0].environment
