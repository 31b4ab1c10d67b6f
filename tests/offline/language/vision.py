"""Tiny models that take images, and images whose squares they count."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

# Ids 0 to 9 are the digits.
VOCABULARY, ASK, END, VISION_END, VISION_START, IMAGE_TOKEN = 16, 10, 11, 12, 13, 15
CELLS, PIXELS = 3, 24


def make_llava(folder: Path) -> Path:
    """LLaVA: a feature, and so an image token, for each patch of 8 pixels."""
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            image_size=PIXELS, patch_size=8,
        ),
        text_config=LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        ),
        image_token_index=IMAGE_TOKEN,
        vision_feature_layer=-1,
    )  # fmt: skip
    Llava(config).save_pretrained(folder)
    CLIPImageProcessorPil(
        size={"shortest_edge": PIXELS}, crop_size={"height": PIXELS, "width": PIXELS}
    ).save_pretrained(folder)
    return _save_tokenizer(folder)


def make_qwen(folder: Path) -> Path:
    """Qwen2-VL: an image token for each 2 x 2 patches of 4 pixels, positions by row and column."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    torch.manual_seed(0)
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
            "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": END,
            "rope_parameters": {
                "rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4,
            },
        },
        vision_config={
            "depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "mlp_ratio": 2,
        },
        image_token_id=IMAGE_TOKEN, video_token_id=14, vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
    )  # fmt: skip
    Qwen2VLForConditionalGeneration(config).save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, min_pixels=64, max_pixels=PIXELS**2
    ).save_pretrained(folder)
    return _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> Path:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0").save_pretrained(folder)
    return folder


def draw(count: int, rng: np.random.Generator) -> bytes:
    """Return a PNG with so many white squares on a grid of 3 x 3, over dark noise."""
    pixels = rng.integers(0, 60, (PIXELS, PIXELS, 3), np.uint8)
    size = PIXELS // CELLS
    for cell in rng.permutation(CELLS**2)[:count]:
        top, left = cell // CELLS * size, cell % CELLS * size
        pixels[top + 1 : top + size - 1, left + 1 : left + size - 1] = 255
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def ask(*images: bytes) -> list[dict[str, Any]]:
    """Return the messages that show images and ask for the number of squares."""
    parts: list[dict[str, Any]] = [
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(one).decode()}"},
        }
        for one in images
    ]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "How many?"}]}]


def ask_ids(num_images: int = 1) -> list[int]:
    """Return the ids of such a prompt, of either model."""
    return [*[VISION_START, *[IMAGE_TOKEN] * CELLS**2, VISION_END] * num_images, ASK]
