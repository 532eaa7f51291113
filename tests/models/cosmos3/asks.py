"""Requests of every mode, as the reference library takes them and as OmniStage does."""

from __future__ import annotations

from typing import Any

import numpy as np

from omnistage.payload import Array, MultimodalPayload
from omnistage.request import OmniRequest
from tests.models.cosmos3.tiny import clip, picture

SMALL = {"height": 32, "width": 48, "num_inference_steps": 3}
ROBOT = {"domain_name": "bridge_orig_lerobot", "resolution_tier": 256, "chunk_size": 6}
FLOW = {"flow_shift": 10.0, "use_karras_sigmas": False}


def noise(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).normal(0, 1, shape).astype(np.float32)


ACTIONS = np.random.default_rng(1).normal(0, 0.5, (4, 10)).astype(np.float32)

# By kind of checkpoint. Frames and pictures have other sizes than the output wherever the mode resizes.
ASKS: dict[str, dict[str, dict[str, Any]]] = {
    "base": {
        "image": {"prompt": '{"scene": "a red cup"}', "num_frames": 1, "height": 64, "width": 48, "seed": 1},
        "video": {"prompt": "A plate falls.", "negative_prompt": "blurry", "num_frames": 13, "fps": 16.0, "seed": 2},
        "video_unguided": {"prompt": "A plate falls", "num_frames": 8, "guidance_scale": 1.0, "seed": 3},
        "video_weakly_guided": {"prompt": "A cat", "num_frames": 5, "guidance_scale": 0.5, "seed": 4, **FLOW},
        "video_no_templates": {
            "prompt": "A cat.", "negative_prompt": "no", "num_frames": 5, "use_system_prompt": False,
            "add_resolution_template": False, "add_duration_template": False, "seed": 5,
        },
        "image_to_video": {"prompt": "It rolls", "image": picture(100, 60), "num_frames": 9, "seed": 6},
        "video_to_video": {"prompt": "More", "video": clip(48, 32, 9), "num_frames": 13, "seed": 7},
        "video_to_video_end": {
            "prompt": "More", "video": clip(48, 32, 11), "num_frames": 13, "condition_video_keep": "last",
            "condition_frame_indexes_vision": [0, 2], "seed": 8,
        },
        "sound": {"prompt": "Rain on tin.", "num_frames": 9, "enable_sound": True, "guidance_scale": 2.0, "seed": 9},
        "sound_from_image": {
            "prompt": "A drum", "image": picture(48, 32), "num_frames": 5, "enable_sound": True,
            "guidance_scale": 2.0, "seed": 10,
        },
        "sound_from_latents": {
            "prompt": "Rain", "num_frames": 9, "enable_sound": True, "guidance_scale": 2.0, "seed": 18,
            "latents": noise(1, 6, 3, 2, 3), "sound_latents": noise(5, 57),
        },
        "image_to_video_from_latents": {
            "prompt": "It rolls", "image": picture(48, 32), "num_frames": 9, "seed": 19,
            "latents": noise(1, 6, 3, 2, 3),
        },
        "policy_from_latents": {
            "prompt": "Lift the pot", "fps": 5.0, "guidance_scale": 1.0, "seed": 20, "action_latents": noise(6, 11),
            "action": {"mode": "policy", "image": picture(48, 32), **ROBOT},
        },
        "policy": {
            "prompt": "Lift the pot", "fps": 5.0, "guidance_scale": 1.0, "use_system_prompt": False, "seed": 11,
            "action": {"mode": "policy", "image": picture(48, 32), "view_point": "wrist_view", **ROBOT}, **FLOW,
        },
        "policy_guided": {
            "prompt": "Lift the pot!", "negative_prompt": "drop it", "guidance_scale": 3.0, "seed": 12,
            "action": {"mode": "policy", "video": clip(50, 40, 3), **ROBOT},
        },
        "forward_dynamics": {
            "prompt": "", "fps": 10.0, "seed": 13,
            "action": {"mode": "forward_dynamics", "image": picture(330, 200), "raw_actions": ACTIONS, **ROBOT},
        },
        "inverse_dynamics": {
            "prompt": "What moved?", "fps": 5.0, "seed": 14,
            "action": {"mode": "inverse_dynamics", "video": clip(32, 48, 5), **ROBOT},
        },
        "transfer": {"prompt": "Stone", "control_videos": {"edge": clip(48, 32, 9, 50)}, "seed": 15},
        "transfer_chunks": {
            "prompt": "Stone", "negative_prompt": "wood", "seed": 16, "control_guidance": 2.0,
            "control_videos": {"seg": clip(48, 32, 12, 50), "edge": clip(60, 40, 12, 70)},
            "num_video_frames_per_chunk": 5, "num_conditional_frames": 2,
        },
        "transfer_intervals": {
            "prompt": "Stone", "seed": 17, "control_guidance": 1.5, "guidance_interval": (0, 980),
            "control_guidance_interval": (900, 1000), "control_videos": {"depth": clip(48, 32, 8, 50)},
            "video": clip(48, 32, 6, 90), "num_first_chunk_conditional_frames": 5, "num_video_frames_per_chunk": 7,
        },
    },
    "edge": {
        "image": {"prompt": "a cup", "num_frames": 1, "seed": 21},
        "video": {"prompt": "A plate falls.", "num_frames": 9, "seed": 22},
        "policy": {
            "prompt": "Lift", "fps": 5.0, "seed": 23,
            "action": {"mode": "policy", "image": picture(48, 32), **ROBOT},
        },
        "transfer": {"prompt": "Stone", "control_videos": {"blur": clip(48, 32, 5, 50)}, "seed": 24},
    },
    "distilled": {
        "image": {"prompt": "a cup", "num_frames": 1, "seed": 31},
        "image_to_video": {"prompt": "It rolls", "image": picture(48, 32), "num_frames": 9, "seed": 32},
        "video_to_video": {"prompt": "More", "video": clip(48, 32, 9), "num_frames": 13, "seed": 33},
    },
}  # fmt: skip
CASES = [(kind, name) for kind, asks in ASKS.items() for name in asks]


def ask_of(kind: str, name: str) -> dict[str, Any]:
    """The request with the sizes that it leaves out."""
    ask = dict(ASKS[kind][name])
    if "action" in ask:
        return {"num_inference_steps": 3} | ask
    sizes = {key: value for key, value in SMALL.items() if kind != "distilled" or key != "num_inference_steps"}
    return sizes | ask


def request_of(identity: str, ask: dict[str, Any]) -> tuple[OmniRequest, dict[str, MultimodalPayload]]:
    """The same request for OmniStage, with its final latents asked for."""
    media: dict[str, MultimodalPayload] = {}

    def reference(kind: str, array: Array) -> dict[str, str]:
        key = f"{kind}{len(media)}"
        media[key] = MultimodalPayload.of({}, **{kind: array})
        return {"media": key}

    def convert(fields: dict[str, Any]) -> dict[str, Any]:
        return {key: reference(key, value) if isinstance(value, np.ndarray) else value for key, value in fields.items()}

    params = convert({key: value for key, value in ask.items() if key not in ("prompt", "seed", "modalities")})
    for name in ("action", "control_videos"):
        if name in params:
            params[name] = convert(params[name])
    params["return_latents"] = True
    modalities = tuple(ask["modalities"]) if "modalities" in ask else None
    request = OmniRequest(id=identity, prompt=ask["prompt"], seed=ask["seed"], params=params, modalities=modalities)
    return request, media
