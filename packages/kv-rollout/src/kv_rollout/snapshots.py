"""What a saved rollout says of itself, and how it is compared with the one that takes it over."""

from collections.abc import Callable, Sequence
from typing import Any

from kv_core import SnapshotError
from torch import Tensor

from kv_rollout.model import ControlSource, RolloutModel, fingerprint
from kv_rollout.sampling import FlowSampler, NoiseSource, Sampler
from kv_rollout.setup import RolloutSetup

KIND = "kv_rollout.ChunkRollout"
_A_FUNCTION = "a function"


def describe(
    *,
    model: RolloutModel,
    setup: RolloutSetup,
    prompts: Sequence[Tensor],
    controls: ControlSource,
    guidance_scale: float | Callable[[int], float],
    keys: Sequence[tuple[int, int]],
    token_frames: int | None,
    sampler: Sampler,
    noise: NoiseSource,
) -> dict[str, Any]:
    """Return, as JSON values, everything that decides what a rollout generates."""
    return {
        "model_id": model.model_id,
        "dtype": str(model.dtype),
        "setup": setup.as_dict(),
        "prompts": [fingerprint(ids) for ids in prompts],
        "controls": getattr(controls, "fingerprint", None),
        "guidance_scale": _A_FUNCTION if callable(guidance_scale) else guidance_scale,
        "noise_keys": [list(key) for key in keys],
        "token_frames": token_frames,
        "sampler": sampler.spec,
        "noise": noise.spec,
    }


def check_kind(state: dict[str, Any]) -> dict[str, Any]:
    """Return the description inside a state.

    Raises:
        SnapshotError: The state is not one of a rollout.
    """
    meta = state["meta"]
    if meta.get("kind") != KIND:
        raise SnapshotError(
            f"this is a snapshot of {meta.get('kind', 'something else')}, not of a rollout"
        )
    spec: dict[str, Any] = meta["spec"]
    return spec


def check_model(spec: dict[str, Any], model: RolloutModel) -> None:
    """Refuse a model that is not the one which began the rollout.

    Raises:
        SnapshotError: Its ``model_id`` or dtype differs.
    """
    check_same(spec, {"model_id": model.model_id, "dtype": str(model.dtype)})


def check_same(saved: dict[str, Any], mine: dict[str, Any], prefix: str = "") -> None:
    """Refuse a description that differs from one's own, naming the first difference.

    Raises:
        SnapshotError: Some value differs.
    """
    for name, value in mine.items():
        other = saved.get(name)
        if isinstance(value, dict) and isinstance(other, dict):
            check_same(other, value, f"{prefix}{name}.")
        elif _plain(other) != _plain(value):
            raise SnapshotError(
                f"the snapshot was made with {prefix}{name} {_plain(other)}, "
                f"but this rollout has {_plain(value)}"
            )


def saved_guidance(
    spec: dict[str, Any], guidance_scale: float | Callable[[int], float] | None
) -> float | Callable[[int], float]:
    """Return the guidance to go on with.

    Raises:
        SnapshotError: It was a function, which is not handed in again.
    """
    if guidance_scale is not None:
        return guidance_scale
    if spec["guidance_scale"] == _A_FUNCTION:
        raise SnapshotError("guidance_scale was a function: pass it to resume() again")
    return float(spec["guidance_scale"])


def saved_sampler(spec: dict[str, Any], sampler: Sampler | None) -> Sampler:
    """Return the sampler to go on with.

    Raises:
        SnapshotError: It was not a `FlowSampler` and is not handed in again.
    """
    if sampler is not None:
        return sampler
    if set(spec["sampler"]) != {"schedule", "sample_type"}:
        raise SnapshotError("the sampler was one of your own: pass it to resume() again")
    return FlowSampler(tuple(spec["sampler"]["schedule"]), spec["sampler"]["sample_type"])


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
