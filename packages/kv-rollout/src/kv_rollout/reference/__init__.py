"""A small multi-view model whose weights ship: it re-renders a video from low-resolution luma."""

from kv_rollout.reference.model import ReferenceModel
from kv_rollout.reference.network import NetworkConfig, ReferenceNetwork
from kv_rollout.reference.views import ViewClip, ViewGrid, stitch_views, view_clip

__all__ = [
    "NetworkConfig",
    "ReferenceModel",
    "ReferenceNetwork",
    "ViewClip",
    "ViewGrid",
    "stitch_views",
    "view_clip",
]
