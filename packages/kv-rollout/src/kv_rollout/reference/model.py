"""The model that ships: the network with its trained weights, as a rollout takes it."""

import hashlib
import json
from importlib.resources import as_file, files
from pathlib import Path

import torch
from kv_core import DtypeError, SnapshotError, SpecError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kv_rollout.model import ControlSource, RolloutState
from kv_rollout.reference.network import NetworkConfig, ReferenceNetwork
from kv_rollout.sampling import SampleType
from kv_rollout.setup import RolloutSetup
from kv_rollout.slot_state import SlotState

WEIGHTS = "weights.safetensors"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class ReferenceModel:
    """Re-render a video cut into overlapping camera views; see MODEL_CARD.md beside this file.

    Tokens are 8 x 8 patches of RGB in [-1, 1], 192 values with the channel fastest. Controls are
    2 x 2 means of BT.601 luma per patch, 4 values, and carry no colour: that comes from the given
    first frames, through the memory. `kv_rollout.reference.view_clip` makes both from a video.

    Args:
        network: The network, on its device and in its dtype.
        model_id: Names the weights in snapshots.

    Raises:
        DtypeError: The network is in none of float32, bfloat16 and float16.
    """

    latent_channels = 3
    default_schedule: tuple[float, ...] = (1.0, 0.95, 0.9, 0.8)
    default_sample_type: SampleType = "ode"
    position_limit: float | None = 65536.0  # FP32 positions are exact to 1/256 of a frame below it

    def __init__(self, network: ReferenceNetwork, *, model_id: str) -> None:
        self.network = network.eval().requires_grad_(False)
        weight = network.head.weight
        if weight.dtype not in _DTYPES:
            raise DtypeError(f"the network must be in one of {_DTYPES}, got {weight.dtype}")
        self.device, self.dtype = weight.device, weight.dtype
        self.token_width = network.config.token_width
        self.control_width = network.config.control_width
        self.latent_patch_size = network.config.patch
        self.default_text_ids = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.model_id = model_id

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "ReferenceModel":
        """Load trained weights.

        Args:
            path: A file that training/train.py wrote; the weights of this package by default.
            device: Where to run.
            dtype: To compute in. The file holds bfloat16, so nothing is lost in any wider one.

        Raises:
            SnapshotError: The file is missing, or not what train.py writes.
        """
        if path is None:
            with as_file(files("kv_rollout.reference") / WEIGHTS) as packaged:
                return cls._load(packaged, torch.device(device), dtype)
        return cls._load(Path(path), torch.device(device), dtype)

    @classmethod
    def _load(cls, path: Path, device: torch.device, dtype: torch.dtype) -> "ReferenceModel":
        try:
            with safe_open(path, framework="pt") as file:
                described = (file.metadata() or {})["config"]
                state = {name: file.get_tensor(name) for name in file.keys()}
            network = ReferenceNetwork(NetworkConfig(**json.loads(described)))
            network.load_state_dict(state)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise SnapshotError(
                f"{path} does not hold weights of the reference model ({error}); "
                "make them with training/train.py, or leave the path out"
            ) from error
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        return cls(network.to(device, dtype), model_id=digest)

    def prepare_rollout(self, setup: RolloutSetup, controls: ControlSource) -> RolloutState:
        """Allocate the memory of one clip and encode its prompt.

        Raises:
            SpecError: A prompt id is not in the table. Id 0 is the null prompt.
        """
        self._check_prompt(setup.text_ids)
        return SlotState(self.network, setup, controls, device=self.device, dtype=self.dtype)

    def _check_prompt(self, text_ids: Tensor) -> None:
        count = self.network.config.prompts
        if text_ids.numel() and not 0 <= int(text_ids.min()) <= int(text_ids.max()) < count:
            raise SpecError(
                f"text_ids must lie in [0, {count}), got {text_ids.flatten().tolist()}; "
                "id 0 is the null prompt that the model was trained with"
            )
