"""Tables of the action tasks: embodiments, canvases, the caption that the model was trained on. Torch-free.

Numbers and sentences are those of the published Cosmos3 pipelines.
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple

from omnistage.errors import RequestError


class Domain(NamedTuple):
    """`number` selects the action head's weights, `width` is the count of action channels in use."""

    number: int
    width: int


DOMAINS = {
    "av": Domain(1, 9),
    "camera_pose": Domain(2, 9),
    "hand_pose": Domain(3, 57),
    "pusht": Domain(4, 2),
    "umi": Domain(6, 10),
    "bridge_orig_lerobot": Domain(7, 10),
    "droid_lerobot": Domain(8, 10),
    "robomind-franka": Domain(8, 10),
    "galbot": Domain(9, 30),
    "robomind-franka-dual": Domain(12, 20),
    "robomind-ur": Domain(13, 10),
    "agibotworld": Domain(15, 29),
    "agibot_gear_gripper": Domain(15, 29),
    "agibot_gear_gripper_ext": Domain(15, 29),
    "fractal": Domain(20, 10),
}

# Canvases (height, width) of each resolution tier; the one of the nearest height/width is taken.
TIERS: dict[int, tuple[tuple[int, int], ...]] = {
    256: ((256, 256), (256, 320), (320, 256), (192, 320), (320, 192)),
    480: ((640, 640), (544, 736), (736, 544), (480, 832), (832, 480)),
    704: ((960, 960), (832, 1088), (1088, 832), (704, 1280), (1280, 704)),
    720: ((960, 960), (832, 1104), (1104, 832), (720, 1280), (1280, 720)),
}

VIEWPOINTS = {
    "ego_view": "This video is captured from a first-person perspective looking at the scene.",
    "third_person_view": (
        "This video is captured from a third-person perspective looking towards the agent from the front."
    ),
    "wrist_view": "This video is captured from a wrist-mounted camera.",
    "concat_view": "This video contains concatenated views from multiple camera perspectives.",
}
_ASPECTS = ("1,1", "4,3", "3,4", "16,9", "9,16")


class Canvas(NamedTuple):
    """Pixels: the padded canvas and the content in its top left corner."""

    height: int
    width: int
    content_height: int
    content_width: int


def canvas_for(height: int, width: int, tier: int, multiple: int) -> Canvas:
    """The canvas for a picture of `height` x `width` pixels, which are first cut down to multiples of `multiple`.

    Content is only ever shrunk. Raises RequestError for a picture smaller than one multiple.
    """
    height, width = height - height % multiple, width - width % multiple
    if not height or not width:
        raise RequestError(f"action: the picture must have at least {multiple} pixels on each side", param="action")
    ratio = height / width
    target_h, target_w = min(TIERS[tier], key=lambda size: abs(size[0] / size[1] - ratio))
    scale = min(target_w / width, target_h / height, 1.0)
    content = [max(1, int(scale * side + 0.5)) for side in (height, width)]
    return Canvas(target_h, target_w, content[0], content[1])


def caption(description: str, *, view_point: str, frames: int, fps: float, canvas: Canvas) -> str:
    """The JSON caption of an action request; `frames` / `fps` is the duration in seconds."""
    seconds = frames / fps
    minutes, rest = divmod(round(seconds), 60)
    text = description.strip()
    if text and not text.endswith((".", "!", "?")):
        text = f"{text}."
    fields: dict[str, object] = {"cinematography": {"framing": VIEWPOINTS[view_point]}}
    fields["actions"] = [{"time": f"0:00-{minutes}:{rest:02d}", "description": text}]
    fields["duration"] = f"{math.floor(seconds)}s"
    fields["fps"] = float(fps)
    fields["resolution"] = {"H": canvas.height, "W": canvas.width}
    fields["aspect_ratio"] = min(_ASPECTS, key=lambda aspect: abs(_ratio(aspect) - canvas.width / canvas.height))
    return json.dumps(fields)


def _ratio(aspect: str) -> float:
    width, height = aspect.split(",")
    return int(width) / int(height)
