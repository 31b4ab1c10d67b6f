"""TokenScorer: the log-probs that a causal language model gives stored tokens."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from replaylake.datastore.episodes.spaces import Array
from replaylake.datastore.errors import SchemaMismatchError
from replaylake.datastore.replay.tokens.token_batch import TokenBatch
from replaylake.offline.language.images import (
    ImageInputs,
    ImageProcessor,
    image_arguments,
    naming_images,
)
from replaylake.offline.language.pretrained import ModelFolder, has_images, load_pretrained


class TokenScorer:
    """A model of transformers, in float32 and without dropout.

    vocabulary: its number of ids. image_processor: None for a model that takes no images.
    """

    def __init__(self, folder: ModelFolder, *, device: str = "cpu") -> None:
        """Load the model.

        Raises: NotFoundError for a model of images without its image processor;
        SourceInvalidError, ExtraMissingError.
        """
        self._model, _ = load_pretrained(folder, "causal language model", device=device)
        self._name, self._device = folder.path.name, device
        self.vocabulary = int(self._model.get_input_embeddings().num_embeddings)
        config = self._model.config
        self._limit = getattr(config.get_text_config(), "max_position_embeddings", None)
        self.image_processor = ImageProcessor(folder) if has_images(config) else None

    @torch.no_grad()
    def compute_log_probs(
        self, batch: TokenBatch[Array], images: ImageInputs | None = None
    ) -> NDArray[np.float64]:
        """Return the log-prob of each token of the loss mask given those before it.

        batch: padded, [B, T]. images: of its sequences, prepared by `image_processor`, for a model
        that takes images. Returns float64 [B, T], 0 elsewhere, and for the first token of a
        sequence, which nothing precedes. Raises: SchemaMismatchError for ids outside of the model's
        vocabulary, for sequences above its limit, and for images that do not fit the ids. Cost:
        logits float32 [B, T, vocabulary] in memory.
        """
        largest = int(batch.token_ids.max()) if batch.token_ids.size else 0
        if largest >= self.vocabulary:
            raise SchemaMismatchError(
                f"model: found token id {largest}, expected ids below {self.vocabulary}, the "
                f"vocabulary of {self._name}. Use a model with the tokenizer of the sequences.",
                parameter="model",
            )
        num, width = batch.token_ids.shape
        if self._limit is not None and width > self._limit:
            raise SchemaMismatchError(
                f"model: {self._name} takes sequences of up to {self._limit:,} tokens, found one "
                f"of {width:,}. Select shorter ones, or use another model.",
                parameter="model",
            )
        ids = torch.as_tensor(batch.token_ids, device=self._device).long()
        inside = torch.arange(width)[None, :] < torch.as_tensor(batch.lengths)[:, None]
        mask = torch.as_tensor(batch.loss_mask).clone()
        mask[:, 0] = False
        inside, mask = inside.to(self._device), mask.to(self._device)
        arguments = {} if images is None else image_arguments(self._model, ids, images)
        with naming_images(images):
            output = self._model(
                input_ids=ids, attention_mask=inside.long(), use_cache=False, **arguments
            )
        # Position t - 1 predicts token t.
        logits = output.logits[:, :-1][mask[:, 1:]].float()
        taken = logits.gather(1, ids[mask][:, None])[:, 0] - logits.logsumexp(dim=-1)
        result = np.zeros((num, width))
        result[mask.cpu().numpy()] = taken.double().cpu().numpy()
        return result
