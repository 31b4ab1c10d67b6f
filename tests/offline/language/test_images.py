"""Models that take images: sampling, training and its errors, with images from the store."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import replaylake as rl
from replaylake.datastore.errors import NotFoundError, SchemaMismatchError, SourceInvalidError
from replaylake.datastore.replay.tokens.sequence_images import SequenceImages
from replaylake.offline.evaluation.ope.sequences import evaluate_sequences
from replaylake.offline.language.images import ImageProcessor
from replaylake.offline.language.pretrained import check_model_folder, load_pretrained
from replaylake.offline.language.sampling import sample_completions
from replaylake.offline.language.token_learner import TokenLearner, TokenOptions
from tests.offline.language import vision

# transformers alone takes 5 s to import.
pytestmark = pytest.mark.slow

MAKE = {"llava": vision.make_llava, "qwen": vision.make_qwen}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    return {name: make(root / name) for name, make in MAKE.items()}


@pytest.fixture(params=sorted(MAKE))
def folder(folders, request):
    return folders[request.param]


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    """Six answers, two to each of three prompts, of which one shows two images."""
    lake = rl.open(tmp_path_factory.mktemp("images") / "lake", create=True)
    rng = np.random.default_rng(0)
    with rl.record_language(lake, "counted", producer="p") as recorder:
        for prompt, counts in enumerate([(1,), (2, 3), (4,)]):
            images = [vision.draw(count, rng) for count in counts]
            for answer in (sum(counts), 9):
                recorder.record(
                    prompt=vision.ask(*images),
                    completion=str(answer),
                    prompt_ids=vision.ask_ids(len(images)),
                    completion_ids=[answer, vision.END],
                    log_probs=[-1.0, -0.5],
                    reward=float(answer == sum(counts)),
                    group_id=f"prompt {prompt}",
                )
    return lake


def read_batch(lake, processor):
    snapshot = lake.snapshot("counted")
    sequences = snapshot.token_sequences()
    sampler = sequences.padded(6, seed=0)
    batch = sampler.sample()
    with SequenceImages(snapshot.table, sequences.table, sampler.sequences) as images:
        return batch, processor.prepare(images.read_sequences(batch.indices))


def make_learner(folder, method="grpo", **options):
    return TokenLearner(check_model_folder(folder), method, TokenOptions(**options), max_tokens=24)


def test_sampled_log_probs_are_those_of_whole_sequences(folder):
    model, _ = load_pretrained(check_model_folder(folder), "causal language model")
    processor, rng = ImageProcessor(check_model_folder(folder)), np.random.default_rng(1)
    images = [[vision.draw(1, rng)], [vision.draw(5, rng), vision.draw(2, rng)], []]
    prompts = [vision.ask_ids(len(own)) if own else [3, 1, vision.ASK] for own in images]
    found = sample_completions(
        model, prompts, max_new_tokens=4, images=processor.prepare(images),
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    for prompt, own, one in zip(prompts, images, found, strict=True):
        ids = torch.tensor([[*prompt, *one.token_ids]])
        given = processor.prepare([own]).concatenate("cpu")
        if given and "image_grid_thw" in given:
            given["mm_token_type_ids"] = (ids == vision.IMAGE_TOKEN).long()
        with torch.no_grad():
            scores = model(input_ids=ids, **given).logits[0].log_softmax(-1)
        expected = [
            scores[len(prompt) - 1 + i, token].item() for i, token in enumerate(one.token_ids)
        ]
        assert one.log_probs == pytest.approx(expected, abs=1e-4)
    # The images are seen: others give other log-probs.
    others = [[vision.draw(9, rng) for _ in own] for own in images]
    seen = sample_completions(
        model, prompts, max_new_tokens=4, images=processor.prepare(others),
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    assert seen[0].log_probs != found[0].log_probs
    assert seen[2].log_probs[0] == pytest.approx(found[2].log_probs[0], abs=1e-5)


def test_off_policy_evaluation_gives_the_model_its_images(folder, tmp_path):
    model_folder = check_model_folder(folder)
    model, _ = load_pretrained(model_folder, "causal language model")
    rng = np.random.default_rng(1)
    images = [[vision.draw(1 + number, rng)] for number in range(8)]
    found = sample_completions(
        model, [vision.ask_ids()] * 8, max_new_tokens=1,
        images=ImageProcessor(model_folder).prepare(images),
        generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    # A model that is not trained also samples image tokens, which stand for no image.
    pairs = [
        (own, one)
        for own, one in zip(images, found, strict=True)
        if vision.IMAGE_TOKEN not in one.token_ids
    ]
    lake = rl.open(tmp_path / "lake", create=True)
    with rl.record_language(lake, "own", producer="p") as recorder:
        for own, one in pairs:
            recorder.record(
                prompt=vision.ask(*own), completion="?", prompt_ids=vision.ask_ids(),
                completion_ids=one.token_ids, log_probs=one.log_probs, reward=1.0,
            )  # fmt: skip
    estimate = evaluate_sequences(lake, "own", str(folder)).estimate
    # The model sampled them itself, with these images.
    assert estimate.mean_weight == pytest.approx(1.0, abs=1e-4)
    assert estimate.effective_size == pytest.approx(len(pairs), abs=1e-4)


def test_parts_of_a_batch_see_their_own_images(lake, folder):
    """One sequence at a time gives the same step as all at once, whose images are one tensor."""
    weights = []
    for size in (None, 1):
        learner = make_learner(folder, micro_batch_size=size, learning_rate=0.01)
        batch, images = read_batch(lake, learner.image_processor)
        learner.update(batch, images=images)
        weights.append(learner.state_dict())
    for name, value in weights[0].items():
        np.testing.assert_allclose(value, weights[1][name], atol=2e-4, err_msg=name)


def test_an_adapter_is_trained_with_images(lake, folder):
    learner = make_learner(folder, lora_rank=2, learning_rate=0.01)
    batch, images = read_batch(lake, learner.image_processor)
    assert learner.update(batch, images=images)["tokens"] == 12


def test_images_that_do_not_fit_the_tokens_are_refused(lake, folder):
    learner = make_learner(folder)
    batch, images = read_batch(lake, learner.image_processor)
    row = next(row for row in range(6) if len(images.rows[row]) == 1)
    rows = [list(own) for own in images.rows]
    rows[row] = []
    with pytest.raises(SchemaMismatchError, match="0 images and 9 image tokens"):
        learner.update(batch, images=type(images)(rows))
    rows[row] = [images.rows[row][0]] * 2
    with pytest.raises(SchemaMismatchError, match="image tokens"):
        learner.update(batch, images=type(images)(rows))


def test_bytes_that_are_no_image_are_refused(folder):
    processor = ImageProcessor(check_model_folder(folder))
    with pytest.raises(SourceInvalidError, match=r"image with the sha256 .*could not be decoded"):
        processor.prepare([[b"no image" * 20]])


def test_a_folder_without_its_image_processor_is_refused(folders, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folders["llava"].iterdir():
        if path.name != "preprocessor_config.json":
            (copy / path.name).write_bytes(path.read_bytes())
    with pytest.raises(NotFoundError, match=r"no preprocessor_config\.json"):
        make_learner(copy)


def sample_counts(folder, images, num_samples, seed):
    """Return for each image the sampled answers: their token and its log-prob."""
    checked = check_model_folder(folder)
    model, _ = load_pretrained(checked, "causal language model")
    shown = [[image] for image in images for _ in range(num_samples)]
    found = sample_completions(
        model, [vision.ask_ids()] * len(shown), max_new_tokens=1,
        images=ImageProcessor(checked).prepare(shown),
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    answers = [(one.token_ids[0], one.log_probs[0]) for one in found]
    return [answers[i : i + num_samples] for i in range(0, len(answers), num_samples)]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.chaos) for seed in range(1, 5))]
)
def test_counting_is_learned_from_recorded_images(folders, tmp_path, seed):
    """By SFT from answers of which half are wrong, then by GRPO from what that model samples."""
    lake, rng = rl.open(tmp_path / "lake", create=True), np.random.default_rng(seed)

    def show(num):
        return [(int(n), vision.draw(int(n), rng)) for n in rng.integers(1, 5, num)]

    def record(recorder, image, answer, **given):
        recorder.record(
            prompt=vision.ask(image), completion=str(answer), prompt_ids=vision.ask_ids(),
            completion_ids=[answer], **given,
        )  # fmt: skip

    def train(dataset, model, output, method, updates, batch_size, rate):
        config = rl.LanguageConfig(
            model=str(model), output=str(tmp_path / output), method=method, seed=seed,
            updates=updates, batch_size=batch_size, options={"learning_rate": rate},
        )  # fmt: skip
        return rl.train_language(lake, dataset, config).output

    with rl.record_language(lake, "logged") as recorder:
        for count, image in show(200):
            is_right = rng.random() < 0.5
            record(recorder, image, count if is_right else int(rng.integers(1, 5)))
    cloned = train("logged", folders["llava"], "cloned", "sft", 60, 32, 2e-3)
    shown = show(64)
    samples = sample_counts(cloned, [image for _, image in shown], 8, seed)
    with rl.record_language(lake, "sampled") as recorder:
        for group, ((count, image), answers) in enumerate(zip(shown, samples, strict=True)):
            for answer, log_prob in answers:
                if answer != vision.IMAGE_TOKEN:  # there is no image for it
                    record(
                        recorder, image, answer, log_probs=[log_prob],
                        reward=float(answer == count), group_id=str(group),
                    )  # fmt: skip
    improved = train("sampled", cloned, "improved", "grpo", 60, 16, 5e-4)
    held_out = show(200)
    shares = []
    for folder in (folders["llava"], cloned, improved):
        answers = sample_counts(folder, [image for _, image in held_out], 1, seed)
        right = [one[0][0] == count for one, (count, _) in zip(answers, held_out, strict=True)]
        shares.append(float(np.mean(right)))
    print(f"random {shares[0]:.3f}, SFT {shares[1]:.3f}, GRPO {shares[2]:.3f}")
    assert shares[0] < 0.3 < shares[1] < shares[2] - 0.15
