"""verl's Megatron engine trains on a CPU beside Hugging Face's model of the same checkpoint."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from support.trainer import TrainerRank

LENGTHS = (7, 10, 5)
"""Of the packed sequences: odd ones are padded for sequence parallelism."""


def train_beside_huggingface(rank: TrainerRank, model: str) -> dict[str, Any]:
    """One step in float32, tensor and sequence parallel over all ranks.

    Returns:
        Of both: the log-probabilities of each token's successor, the loss and the gradient's norm.
    """
    import_module("support.megatron_stand_ins")  # before megatron is imported
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    config = McoreEngineConfig(
        tensor_model_parallel_size=rank.tp,
        vanilla_mbridge=True,
        param_offload=True,
        optimizer_offload=True,
        override_transformer_config={"attention_backend": "flash"},
    )
    object.__setattr__(config, "dtype", "float32")  # verl would refuse it
    engine = MegatronEngineWithLMHead(
        HFModelConfig(path=model),
        config,
        McoreOptimizerConfig(lr=1e-2, total_training_steps=1),
        CheckpointConfig(),
    )
    engine.initialize()
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(256, (length,), generator=generator) for length in LENGTHS]
    batch = _batch(sequences)
    with engine.eval_mode():
        output = engine.forward_backward_batch(batch, None, forward_only=True)["model_output"]
    with engine.train_mode():
        losses = engine.forward_backward_batch(batch, _loss)["loss"]
        norm = engine.optimizer_step()
    found = {"log_probs": _known(output["log_probs"]).tolist(), "loss": losses[0], "norm": norm}
    return {"megatron": found, "huggingface": _huggingface(Path(model), sequences)}


def _batch(sequences: list[torch.Tensor]) -> Any:
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.utils.dataset.dataset_utils import DatasetPadMode

    def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    tensors = {
        "input_ids": nested(sequences),
        "loss_mask": nested([torch.ones_like(each) for each in sequences]),
    }
    batch = TensorDict(tensors, batch_size=[len(sequences)])
    tensordict_utils.assign_non_tensor(
        batch,
        temperature=1.0,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=len(sequences),
        pad_mode=DatasetPadMode.NO_PADDING,
    )
    return batch


def _known(log_probs: torch.Tensor) -> torch.Tensor:
    """Of the tokens that have a successor."""
    return torch.cat([each[:-1] for each in log_probs.unbind()])


def _loss(model_output: Any, **_: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return -_known(model_output["log_probs"]).mean(), {}


def _huggingface(model: Path, sequences: list[torch.Tensor]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    log_probs = torch.cat(
        [
            reference(each[None]).logits[0, :-1].log_softmax(-1).gather(1, each[1:, None])[:, 0]
            for each in sequences
        ]
    )
    loss = -log_probs.mean()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    return {"log_probs": log_probs.tolist(), "loss": loss.item(), "norm": norm.item()}
