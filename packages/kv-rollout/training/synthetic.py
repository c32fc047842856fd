"""Make short films on the GPU: photographs that move, layer over layer, and pieces of a real film.

A film is a canvas of several overlapping views. Behind everything moves a background; objects cut
from other pictures move over it, each with its own path, colours and deformation. Colours are
shuffled from film to film: they cannot be guessed from brightness and have to be remembered.
"""

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from kv_rollout.reference.views import ViewGrid
from torch import Tensor

TILE = 224  # side of a square picture in the bank, in pixels
SUBFRAMES = 2  # moments averaged into one frame: light motion blur
COLOUR_TILES, GREY_TILES, DRAWN_TILES, BLOBS = 440, 100, 160, 128
_TO_YUV = (
    (0.299, 0.587, 0.114),
    (-0.168736, -0.331264, 0.5),
    (0.5, -0.418688, -0.081312),
)


class FilmMaker:
    """Draw batches of films.

    Args:
        data: ``photo.*`` as ``[3, rows, columns]`` and ``film.train`` as ``[F, 3, rows, columns]``,
            all uint8, see prepare.py.
        grid: How the canvas is cut into views.
        device: Where everything lives.
        seed: Of the pictures and of everything drawn later.
        scale: Fraction of the bank to build; tests want a small one.
    """

    def __init__(
        self,
        data: Mapping[str, Tensor],
        grid: ViewGrid,
        *,
        device: torch.device,
        seed: int = 0,
        scale: float = 1.0,
    ) -> None:
        self.grid, self.device = grid, device
        self.dice = torch.Generator(device).manual_seed(seed)
        photos = [data[name].to(device) for name in sorted(data) if name.startswith("photo.")]
        grey = [bool((p[0] == p[1]).all() and (p[1] == p[2]).all()) for p in photos]
        colour = [p for p, g in zip(photos, grey, strict=True) if not g]
        plain = [p for p, g in zip(photos, grey, strict=True) if g]
        tiles = [self._tile(colour[i % len(colour)]) for i in range(int(COLOUR_TILES * scale))]
        tiles += [
            self._tint(self._tile(plain[i % len(plain)])) for i in range(int(GREY_TILES * scale))
        ]
        drawn = self._draw_leaves(max(2, int(DRAWN_TILES * scale)))
        self.tiles = torch.cat([torch.stack(tiles), drawn]).clamp(0, 1).half()  # [M, 3, TILE, TILE]
        self.blobs = self._draw_blobs(max(2, int(BLOBS * scale))).half()  # [Mb, 1, TILE, TILE]
        self.film = data["film.train"].to(device).float().div_(255).half()

    def batch(self, clips: int, frames: int, *, film_fraction: float = 0.15) -> Tensor:
        """Return views ``[clips, V, 3, frames, height, width]`` in [-1, 1], FP32."""
        real = min(clips - 1, round(clips * film_fraction)) if clips > 1 else 0
        canvas = self._layers(clips - real, frames)
        if real:
            canvas = torch.cat([canvas, self._film(real, frames)])
        canvas = self._light(canvas)
        grid = self.grid
        standard = self._chance(0.7)
        views = []
        for view in range(grid.num_views):
            y, x = grid.corner(view)
            if not standard:
                y = self._integer(grid.canvas_height - grid.height + 1)
                x = self._integer(grid.canvas_width - grid.width + 1)
            views.append(canvas[..., y : y + grid.height, x : x + grid.width])
        return (torch.stack(views, dim=1) * 2 - 1).clamp(-1, 1)

    # Random numbers. Host decisions draw from the host, so that the device is never waited for.

    def _chance(self, probability: float) -> bool:
        return float(torch.rand(())) < probability

    def _integer(self, limit: int) -> int:
        return int(torch.randint(limit, ()))

    def _uniform(self, low: float, high: float, *shape: int) -> Tensor:
        draw = torch.rand(shape, generator=self.dice, device=self.device)
        return low + (high - low) * draw

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.dice, device=self.device)

    def _happens(self, probability: float, *shape: int) -> Tensor:
        return (self._uniform(0, 1, *shape) < probability).float()

    # Pictures.

    def _tile(self, photo: Tensor) -> Tensor:
        """Cut a random square out of a resized photograph; ``[3, TILE, TILE]`` in [0, 1]."""
        picture = photo.float().div(255)[None]
        shorter = min(picture.shape[-2:])
        target = math.exp(
            float(torch.empty(()).uniform_(math.log(130), math.log(max(shorter, 131))))
        )
        factor = min(1.0, target / shorter)
        size = [max(16, round(side * factor)) for side in picture.shape[-2:]]
        picture = F.interpolate(picture, size=size, mode="bilinear", antialias=True)
        for axis in (-2, -1):
            while picture.shape[axis] < TILE:  # continue a small picture by its mirror image
                picture = torch.cat([picture, picture.flip(axis)], dim=axis)
        y = self._integer(picture.shape[-2] - TILE + 1)
        x = self._integer(picture.shape[-1] - TILE + 1)
        return picture[0, :, y : y + TILE, x : x + TILE]

    def _tint(self, tile: Tensor) -> Tensor:
        """Colour a grey tile: three random curves of its brightness."""
        level = tile[:1]
        ends = self._uniform(0, 1, 2, 3, 1, 1)
        bend = self._uniform(-0.3, 0.3, 3, 1, 1) * (level * (1 - level) * 4)
        mixed = ends[0] * (1 - level) + ends[1] * level + bend
        return 0.6 * mixed + 0.4 * level

    def _noise_pictures(self, count: int, slope: float) -> Tensor:
        """Return noise ``[count, 1, TILE, TILE]`` with spectrum ``f ** -slope``, unit variance."""
        spectrum = torch.fft.rfft2(self._normal(count, TILE, TILE))
        fy = torch.fft.fftfreq(TILE, device=self.device)[:, None]
        fx = torch.fft.rfftfreq(TILE, device=self.device)[None]
        spectrum = spectrum / (fy.square() + fx.square()).sqrt().clamp(min=1 / TILE).pow(slope)
        picture = torch.fft.irfft2(spectrum, s=(TILE, TILE))
        picture = picture - picture.mean((-2, -1), keepdim=True)
        return (picture / picture.std((-2, -1), keepdim=True))[:, None]

    def _draw_leaves(self, count: int) -> Tensor:
        """Paint ``[count, 3, TILE, TILE]``: ellipses and boxes on each other, striped or shaded."""
        ys = torch.arange(TILE, device=self.device, dtype=torch.float32)[:, None]
        xs = torch.arange(TILE, device=self.device, dtype=torch.float32)[None]
        texture = self._noise_pictures(count, 1.0)
        base = self._uniform(0, 1, count, 3, 1, 1)
        picture = base + 0.15 * texture
        for _ in range(90):
            radius = 5 * (1 - self._uniform(0, 0.96, count, 1, 1)).pow(-0.75)
            cy, cx = self._uniform(0, TILE, count, 1, 1), self._uniform(0, TILE, count, 1, 1)
            angle = self._uniform(0, 2 * math.pi, count, 1, 1)
            u = (ys - cy) * angle.cos() + (xs - cx) * angle.sin()
            w = (xs - cx) * angle.cos() - (ys - cy) * angle.sin()
            u, w = u / radius, w / radius / self._uniform(0.35, 1.0, count, 1, 1)
            boxy = self._happens(0.4, count, 1, 1)
            distance = boxy * torch.maximum(u.abs(), w.abs()) + (1 - boxy) * (u * u + w * w).sqrt()
            inside = ((1 - distance) * radius + 0.5).clamp(0, 1)[:, None]
            stripes = (u * radius * self._uniform(0.25, 1.4, count, 1, 1)).sin()[:, None]
            shade = self._uniform(-0.2, 0.2, count, 3, 1, 1) * u[:, None].clamp(-1, 1)
            paint = self._uniform(0, 1, count, 3, 1, 1) + shade
            paint = (
                paint
                + self._happens(0.3, count, 1, 1, 1) * 0.3 * self._normal(count, 3, 1, 1) * stripes
            )
            paint = paint + self._uniform(0, 0.15, count, 1, 1, 1) * texture
            picture = picture * (1 - inside) + paint * inside
        return torch.lerp(
            picture.mean(1, keepdim=True), picture, self._uniform(0.3, 1, count, 1, 1, 1)
        )

    def _draw_blobs(self, count: int) -> Tensor:
        """Draw soft-edged outlines of objects, ``[count, 1, TILE, TILE]`` in [0, 1], centred."""
        ys = torch.arange(TILE, device=self.device, dtype=torch.float32)[:, None] - TILE / 2
        xs = torch.arange(TILE, device=self.device, dtype=torch.float32)[None] - TILE / 2
        theta = torch.atan2(ys, xs)[None]
        radius = self._uniform(10, 34, count, 1, 1)
        outline = torch.ones_like(theta).expand(count, -1, -1)
        for wave in range(1, 7):
            phase = self._uniform(0, 2 * math.pi, count, 1, 1)
            outline = (
                outline + self._normal(count, 1, 1) * 0.22 / wave * (wave * theta + phase).cos()
            )
        stretch = self._uniform(0.6, 1.6, count, 1, 1)
        distance = ((ys * stretch).square() + (xs / stretch).square()).sqrt()
        softness = self._uniform(0.7, 1.6, count, 1, 1)
        return ((radius * outline.clamp(0.4, 2) - distance) / softness + 0.5).clamp(0, 1)[:, None]

    # Movement.

    def _path(self, clips: int, moments: Tensor, speed: float, still: float) -> Tensor:
        """Return a smooth path ``[clips, moments]`` that starts at 0; some stay where they are."""
        t = moments[None]
        drift = self._normal(clips, 1) * t
        wave = self._uniform(0.1, 0.7, clips, 1)
        phase = self._uniform(0, 2 * math.pi, clips, 1)
        swing = ((wave * t + phase).sin() - phase.sin()) / wave * self._normal(clips, 1)
        size = speed * self._uniform(0.1, 1.0, clips, 1) * (1 - self._happens(still, clips, 1))
        return size * (0.7 * drift + 0.7 * swing)

    def _places(
        self, clips: int, moments: Tensor, *, speed: float, still: float, zoom: tuple[float, float]
    ) -> Tensor:
        """Return where each canvas pixel looks, ``[clips, moments, rows, columns, 2]``, in pixels.

        Origin is the middle of the canvas; the last axis is (x, y).
        """
        grid = self.grid
        rows, columns = grid.canvas_height, grid.canvas_width
        y = torch.arange(rows, device=self.device) - (rows - 1) / 2
        x = torch.arange(columns, device=self.device) - (columns - 1) / 2
        angle = self._path(clips, moments, 0.012, max(still, 0.5))
        angle = angle + self._uniform(-0.3, 0.3, clips, 1)
        size = self._path(clips, moments, 0.012, max(still, 0.5))
        size = self._uniform(*zoom, clips, 1) * size.clamp(-0.5, 0.5).exp()
        shear = self._path(clips, moments, 0.008, 0.7) + self._uniform(-0.15, 0.15, clips, 1)
        aspect = self._uniform(0.85, 1.15, clips, 1)
        flip = 1 - 2 * self._happens(0.5, clips, 1)
        cos, sin = angle.cos() * size, angle.sin() * size
        dx = self._path(clips, moments, speed, still)
        dy = self._path(clips, moments, speed * 0.7, still)

        def spread(value: Tensor) -> Tensor:
            return value[:, :, None, None]

        px = spread(cos * flip * aspect) * x + spread(-sin + shear) * y[:, None] + spread(dx)
        py = spread(sin * flip) * x + spread(cos / aspect) * y[:, None] + spread(dy)
        return torch.stack([px, py], dim=-1) + self._wobble(clips, moments)

    def _wobble(self, clips: int, moments: Tensor) -> Tensor:
        """Return a rubber-like deformation, ``[clips, moments, rows, columns, 2]`` in pixels."""
        grid = self.grid
        modes = 3
        fields = self._normal(clips * modes, 2, 4, 5)
        fields = F.interpolate(
            fields, size=(grid.canvas_height, grid.canvas_width), mode="bicubic", align_corners=True
        )
        fields = fields.view(clips, modes, -1)
        wave = self._uniform(0.05, 0.6, clips, modes, 1)
        phase = self._uniform(0, 2 * math.pi, clips, modes, 1)
        weight = (wave * moments + phase).sin() - phase.sin()  # [clips, modes, moments]
        size = self._uniform(0.0, 1.6, clips, 1, 1) * self._happens(0.45, clips, 1, 1)
        moved = (weight * size).transpose(1, 2) @ fields
        moved = moved.view(clips, -1, 2, grid.canvas_height, grid.canvas_width)
        return moved.permute(0, 1, 3, 4, 2)

    def _look(self, pictures: Tensor, places: Tensor, padding: str) -> Tensor:
        """Sample pictures ``[n, Ch, R, C]`` at pixels ``places`` ``[n, m, rows, columns, 2]``."""
        n, m, rows, columns, _ = places.shape
        R, C = pictures.shape[-2:]
        scale = places.new_tensor([2 / C, 2 / R])
        seen = F.grid_sample(
            pictures.float(),
            (places * scale).view(n, m * rows, columns, 2),
            mode="bilinear",
            padding_mode=padding,
            align_corners=False,
        )
        return seen.view(n, -1, m, rows, columns)

    def _layers(self, clips: int, frames: int) -> Tensor:
        """Return a background and up to three objects, ``[clips, 3, frames, rows, columns]``."""
        step = 1 / SUBFRAMES
        pace = 0.5 if self._chance(0.2) else 1.0
        moments = torch.arange(frames * SUBFRAMES, device=self.device) * step * pace
        shutter = self._uniform(0.0, 1.0, clips, 1) * self._happens(0.5, clips, 1)
        odd = torch.arange(frames * SUBFRAMES, device=self.device) % SUBFRAMES * step
        moments = moments - odd * pace  # whole frames; the second moment comes later by the shutter
        canvas = None
        for layer in range(4):
            present = 1.0 if layer == 0 else (0.75, 0.5, 0.3)[layer - 1]
            chosen = torch.randint(len(self.tiles), (clips,))
            tiles = self._recolour(self.tiles[chosen.to(self.device)].float())
            speed, still = (2.2, 0.45) if layer == 0 else (3.0, 0.15)
            zoom = (0.55, 1.35) if layer == 0 else (0.6, 1.5)
            places = self._places(clips, moments, speed=speed, still=still, zoom=zoom)
            if SUBFRAMES > 1:
                places = self._open_shutter(places, shutter)
            if layer == 0:
                canvas = self._look(tiles, places, "reflection")
                continue
            # The object's outline is sampled at the same places, and put somewhere on the canvas.
            offset = torch.stack(
                [self._uniform(-45, 45, clips), self._uniform(-32, 32, clips)], dim=-1
            )
            places = places + offset[:, None, None, None]
            chosen = torch.randint(len(self.blobs), (clips,))
            cover = self._look(self.blobs[chosen.to(self.device)], places, "zeros")
            cover = cover * self._happens(present, clips, 1, 1, 1, 1)
            shift = self._uniform(-50, 50, clips, 1, 1, 1, 2)
            canvas = torch.lerp(canvas, self._look(tiles, places + shift, "reflection"), cover)
        assert canvas is not None
        return canvas.unflatten(2, (frames, SUBFRAMES)).mean(3)

    def _open_shutter(self, places: Tensor, shutter: Tensor) -> Tensor:
        """Move the second moment of every frame towards the next frame's, by half the shutter."""
        pairs = places.unflatten(1, (-1, SUBFRAMES))
        following = torch.cat([pairs[:, 1:, 0], 2 * pairs[:, -1:, 0] - pairs[:, -2:-1, 0]], dim=1)
        later = torch.lerp(pairs[:, :, 0], following, shutter[:, :, None, None, None] * 0.5)
        return torch.stack([pairs[:, :, 0], later], dim=2).flatten(1, 2)

    def _film(self, clips: int, frames: int) -> Tensor:
        """Return pieces of the real film, ``[clips, 3, frames, rows, columns]`` in [0, 1]."""
        total, _, R, C = self.film.shape
        canvas = []
        moments = torch.arange(frames, device=self.device, dtype=torch.float32)
        places = self._places(clips, moments, speed=0.6, still=0.7, zoom=(0.7, 1.55))
        for clip in range(clips):
            pace = 1 if 2 * frames > total or self._chance(0.7) else 2
            first = self._integer(total - (frames - 1) * pace)
            index = torch.arange(frames) * pace + first
            if self._chance(0.5):
                index = index.flip(0)
            pictures = self.film[index.to(self.device)]  # [frames, 3, R, C]
            room = torch.tensor([C / 2 - 62.0, R / 2 - 44.0], device=self.device)
            centre = self._uniform(-1, 1, 2) * room
            seen = self._look(pictures, (places[clip] + centre)[:, None], "reflection")
            canvas.append(seen[:, :, 0].transpose(0, 1))
        return self._recolour(torch.stack(canvas).flatten(-2)[..., None]).view(
            clips, 3, frames, self.grid.canvas_height, self.grid.canvas_width
        )

    # Colour and light.

    def _recolour(self, pictures: Tensor) -> Tensor:
        """Shuffle hue, saturation, tint, contrast, brightness and gamma of ``[n, 3, ...]``."""
        n = len(pictures)
        matrix = torch.tensor(_TO_YUV, device=self.device)
        free = self._happens(0.75, n)  # the others stay natural
        hue = free * self._uniform(-math.pi, math.pi, n) * self._happens(0.6, n)
        saturation = 1 + free * self._uniform(-0.8, 1.0, n)
        contrast = 1 + free * self._uniform(-0.4, 0.25, n)
        gamma = (free * self._uniform(-0.4, 0.4, n)).exp()
        turn = torch.zeros(n, 3, 3, device=self.device)
        turn[:, 0, 0] = contrast
        turn[:, 1, 1] = turn[:, 2, 2] = saturation * contrast * hue.cos()
        turn[:, 1, 2], turn[:, 2, 1] = -saturation * hue.sin(), saturation * hue.sin()
        mixing = matrix.inverse() @ turn @ matrix
        tint = free[:, None] * self._normal(n, 3) * 0.06 + (free * self._normal(n) * 0.1)[:, None]
        shape = (n, 1) + (1,) * (pictures.ndim - 2)
        flat = (mixing @ (pictures.flatten(2) - 0.5)).view_as(pictures) + 0.5
        flat = flat + tint.view(n, 3, *shape[2:])
        return flat.clamp(0, 1).pow(gamma.view(shape))

    def _light(self, canvas: Tensor) -> Tensor:
        """Let brightness flicker, and a soft shadow pass over some films."""
        clips, _, frames, rows, columns = canvas.shape
        t = torch.arange(frames, device=self.device, dtype=torch.float32)
        flicker = self._path(clips, t, 0.02, 0.6).clamp(-0.3, 0.3)
        flicker = flicker + 0.02 * self._normal(clips, frames) * self._happens(0.15, clips, 1)
        field = F.interpolate(
            self._normal(clips, 1, 3, 3, 4), size=(frames, rows, columns), mode="trilinear"
        )
        shadow = (
            0.12 * self._uniform(0, 1, clips, 1, 1, 1, 1) * self._happens(0.35, clips, 1, 1, 1, 1)
        )
        gain = 1 + flicker[:, None, :, None, None] + shadow * field
        grain = self._uniform(0, 0.012, clips, 1, 1, 1, 1) * self._happens(0.4, clips, 1, 1, 1, 1)
        noise = torch.randn(canvas.shape, generator=self.dice, device=self.device)
        return (canvas * gain + grain * noise).clamp(0, 1)
