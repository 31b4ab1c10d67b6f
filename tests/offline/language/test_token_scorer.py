"""Log-probs of stored tokens, and off-policy evaluation of a model by them."""

import numpy as np
import pytest
import torch

import replaylake as rl
from replaylake.cli.main import main
from replaylake.datastore.errors import NotFoundError, SchemaMismatchError
from replaylake.datastore.lake.lake import open_lake
from replaylake.offline.evaluation.ope.sequences import evaluate_sequences
from replaylake.offline.language.pretrained import ORIGIN, check_model_folder
from replaylake.offline.language.token_scorer import TokenScorer

EPISODES = 64


@pytest.fixture(scope="session")
def other_model(model_folder, tmp_path_factory):
    """The same model with a bias of its weights; far: many times as much."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def save(scale):
        model = AutoModelForCausalLM.from_pretrained(model_folder)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            head += scale * torch.randn(head.shape, generator=generator)
        path = tmp_path_factory.mktemp("other") / "near"
        model.save_pretrained(path)
        AutoTokenizer.from_pretrained(model_folder).save_pretrained(path)
        return path

    return save


def test_log_probs_are_those_that_were_recorded(recorded, model_folder):
    sequences = recorded.snapshot("agents").token_sequences()
    batch = sequences.gather(np.arange(len(sequences)), is_packed=False, versions=False)
    found = TokenScorer(check_model_folder(model_folder)).compute_log_probs(batch)
    assert found[batch.loss_mask] == pytest.approx(batch.log_probs[batch.loss_mask], abs=1e-5)
    assert not found[~np.asarray(batch.loss_mask)].any()


def test_a_model_on_its_own_samples_has_the_logs_mean(recorded, model_folder):
    report = evaluate_sequences(recorded, "agents", str(model_folder))
    one = report.estimate
    assert one.effective_size == pytest.approx(EPISODES, abs=1e-3)
    assert one.value == pytest.approx(one.log_mean, abs=1e-4)
    assert (one.num_episodes, one.num_tasks, one.mean_tokens) == (EPISODES, 16, 5)
    # 64 episodes are few, whatever their weights.
    assert report.verdict == "weak"
    assert report.to_json()["estimates"][0]["estimator"] == "sequence_snis"


def test_another_model_is_weighted_by_its_log_probs(recorded, model_folder, other_model):
    path = other_model(0.1)
    one = evaluate_sequences(recorded, "agents", str(path)).estimate
    sequences = recorded.snapshot("agents").token_sequences()
    batch = sequences.gather(np.arange(len(sequences)), is_packed=False, versions=False)
    ratios = TokenScorer(check_model_folder(path)).compute_log_probs(batch) - batch.log_probs
    weights = np.exp((ratios * batch.loss_mask).sum(axis=1))
    assert one.mean_weight == pytest.approx(weights.mean(), rel=1e-5)
    assert one.value == pytest.approx((weights * batch.returns).sum() / weights.sum(), rel=1e-5)
    assert one.effective_size == pytest.approx(weights.sum() ** 2 / (weights**2).sum(), rel=1e-5)
    assert one.effective_size < EPISODES


def test_a_far_model_is_refused_with_exit_code_3(recorded, other_model, capfd, tmp_path):
    path = other_model(6.0)
    lake = str(recorded.storage.root)
    assert main(["ope", "agents", "--model", str(path), "--lake", lake]) == 3
    out = capfd.readouterr().out
    assert "not supported: Weights of whole sequences leave an effective" in out
    assert "sequence_snis" not in out
    assert main(["ope", "agents", "--model", str(path), "--gamma", "0.9", "--lake", lake]) == 2
    assert "--gamma: cannot be used with --model" in " ".join(capfd.readouterr().err.split())


def test_the_command_prints_and_keeps_the_estimate(recorded, model_folder, capfd):
    lake = str(recorded.storage.root)
    assert main(["ope", "agents", "--model", str(model_folder), "--lake", lake]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("model tiny on agents@")
    assert lines[2].startswith("sequence_snis ")
    saved = recorded.registry.evaluations.list()[-1]
    assert (saved.kind, saved.verdict, saved.policy) == ("ope", "weak", None)
    assert saved.report["model"] == "tiny"


def test_one_task_has_no_interval(recorded, model_folder, capfd, tmp_path):
    sequences = recorded.snapshot("agents").token_sequences()
    batch = sequences.gather(np.arange(len(sequences)), is_packed=False, versions=False)
    lake = rl.open(tmp_path / "lake", create=True)
    with rl.record_language(lake, "one", producer="p") as recorder:
        for row, length in enumerate(batch.lengths):
            ids, mask = batch.token_ids[row, :length], batch.loss_mask[row, :length]
            recorder.record(
                prompt="?", completion="!", reward=float(row % 2), group_id="task",
                prompt_ids=ids[~mask].tolist(), completion_ids=ids[mask].tolist(),
                log_probs=batch.log_probs[row, :length][mask].tolist(),
            )  # fmt: skip
    assert main(["ope", "one", "--model", str(model_folder), "--lake", str(tmp_path / "lake")]) == 0
    out = capfd.readouterr().out
    assert "sequence_snis 0.5; difference " in out
    assert "unknown" not in out
    assert "All episodes are of one task" in out


def test_a_model_that_was_trained_on_the_data_is_weak(recorded, other_model):
    path = other_model(0.0)
    (path / ORIGIN).write_text('{"datasets": [{"dataset": "agents"}]}')
    report = evaluate_sequences(recorded, "agents", str(path))
    assert report.estimate.assessment.reason.startswith("The model was trained on agents")


def test_sequences_without_log_probs_are_refused(tmp_path, model_folder):
    lake = open_lake(tmp_path / "lake", create=True)
    episode = rl.Episode(
        "a",
        observations=np.array(["?"], object),
        actions=np.array(["!"], object),
        rewards=np.array([1.0]),
        terminated=True,
        extras={"observation_tokens": [[1, 2]], "action_tokens": [[3, 50]]},
    )
    lake.dataset("plain").append([episode])
    with pytest.raises(SchemaMismatchError, match="without log-probs"):
        evaluate_sequences(lake, "plain", str(model_folder))
    with pytest.raises(NotFoundError, match=r"config\.json"):
        evaluate_sequences(lake, "plain", str(tmp_path))
    batch = lake.snapshot("plain").token_sequences().gather(
        np.array([0]), is_packed=False, versions=False
    )  # fmt: skip
    with pytest.raises(SchemaMismatchError, match="found token id 50, expected ids below 24"):
        TokenScorer(check_model_folder(model_folder)).compute_log_probs(batch)
