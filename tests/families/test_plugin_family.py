"""Tests a model family in a plug-in file: the trainer, the embedded engine, the plan and the export use it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.families import CONTEXT, REACH, engine_gaps, trainer_gaps
from benchmarks.family_models import SIZES, make_family_model
from relax_core.config.compose import compose, load_config, typed_config
from relax_core.config.errors import ConfigError
from relax_core.config.schema import EngineConfig
from relax_core.control.model_folders import teacher_folders
from relax_core.engines.build_client import build_client
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.families.folder import folder_architecture
from relax_core.families.hf_config import read_hf_config
from relax_core.plan.model_dimensions import find_dimensions
from relax_core.preflight import CHECKS
from relax_core.registry import PluginError, find_family
from relax_core.roles.engine_owner import EngineOwner
from relax_core.tools import check_model, export
from relax_core.tools.tiny_text import write_prompt_tokenizer
from relax_core.train.checkpoints.checkpoint_store import CheckpointStore
from tests.data.chat_templates import write_two_words
from tests.train.tiny_trainer import dp_groups, export_folder, make_backend, train_step

REPOSITORY = Path(__file__).resolve().parents[2]
FILE = REPOSITORY / "examples" / "plugins" / "seed_oss.py"
SETTINGS: dict[str, Any] = {
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
    "tie_word_embeddings": False,
    "head_dim": 24,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
ENGINE = EngineConfig(
    name="embedded",
    count=1,
    port=0,
    max_running_samples=64,
    max_total_tokens=64 * CONTEXT,
    context_length=CONTEXT,
    threads=1,
    start_timeout_s=120.0,
)


@pytest.fixture(scope="module")
def seed_oss(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Returns a tiny random folder of the family, and the transformers model that wrote it."""
    folder: Path = tmp_path_factory.mktemp("seed_oss")
    model = make_family_model(folder, "seed_oss", **SETTINGS)
    assert type(model).__name__ == "SeedOssForCausalLM" and model.model.layers[0].self_attn.k_proj.bias is not None
    write_prompt_tokenizer(folder)
    return folder, model


def test_the_trainer_computes_what_transformers_does(seed_oss: tuple[Path, Any]) -> None:
    folder, model = seed_oss
    gaps = trainer_gaps(folder, model, family=str(FILE))
    assert max(gaps.values()) <= REACH, gaps


def embedded_gaps(folder: Path, model: Any, *, family: Path, scratch: Path) -> tuple[float, float]:
    """Starts an embedded engine that reads the family from a file, and returns its `engine_gaps`."""
    token_file = scratch / "token"
    token_file.write_text("token")
    launch = EngineLaunch(
        model_folder=folder,
        family=str(family),
        engine=ENGINE,
        dtype="float32",
        token_file=token_file,
        log_file=scratch / "log",
        load_weights=True,
    )
    process = EngineProcess.start(launch)
    try:
        client = build_client(ENGINE, process.url, model_folder=folder, token_file=token_file)
        return engine_gaps(client, model)
    finally:
        process.stop(timeout_s=5.0)


def test_the_embedded_engine_computes_what_transformers_does(seed_oss: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = seed_oss
    assert max(embedded_gaps(folder, model, family=FILE, scratch=tmp_path)) <= REACH


def test_exports_are_the_folder_to_the_byte(
    seed_oss: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before a train step the trainer's export equals the file that transformers wrote. After a step, `relax export`
    finds the family in the checkpoint's configuration and writes the trainer's weights.
    """
    folder, _ = seed_oss
    backend = make_backend(folder, family=str(FILE))
    assert exported(backend, folder, tmp_path / "before") == (folder / "model.safetensors").read_bytes()
    train_step(backend, dp_groups())

    def write(partial: Path) -> None:
        keys = {"path": str(folder), "builtin": None, "family": str(FILE)}
        (partial / "config.yaml").write_text(json.dumps({"model": keys}))
        backend.save(partial / "train")

    checkpoint = CheckpointStore(tmp_path / "checkpoints", keep_last=1).write(1, writers=write, meta={})
    assert export.main([str(checkpoint), str(tmp_path / "out"), "--trust"]) == 0, capsys.readouterr().err
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == exported(backend, folder, tmp_path / "after")
    assert read_hf_config(tmp_path / "out") == read_hf_config(folder)


def exported(backend: Any, folder: Path, target: Path) -> bytes:
    export_folder(backend, folder, target)
    return (target / "model.safetensors").read_bytes()


def test_the_configuration_alone_names_it(
    seed_oss: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relax makes a relative path absolute, every check before a start passes, and the plan counts the biases."""
    folder, model = seed_oss
    monkeypatch.chdir(REPOSITORY)
    words = ["model=folder", f"model.path={folder}", "model.task=arithmetic", "reward=math", "data=arithmetic"]
    words.append("rollout.max_new_tokens=8")  # the model has few positions
    config = load_config([*words, "model.family=examples/plugins/seed_oss.py"], checks=CHECKS)
    assert config.model.family == str(FILE)
    assert find_dimensions(config).parameters == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ConfigError, match="its model_type is 'seed_oss', which is not a family of Relax"):
        load_config(words, checks=CHECKS)
    with pytest.raises(ConfigError, match="its model_type is 'seed_oss', which is not a family of Relax"):
        load_config([*words, "model.family=qwen2"], checks=CHECKS)


def test_the_owner_of_an_engine_hands_it_on(seed_oss: tuple[Path, Any], tmp_path: Path) -> None:
    """The engine's process has no configuration: its command line names the family."""
    folder, _ = seed_oss
    words = ["model=folder", f"model.path={folder}", f"model.family={FILE}", "engine.context_length=64"]
    host: Any = object.__new__(EngineOwner)  # the owner's thread would start an engine
    host._rank = 0
    host.name, host.context = (
        "engine-0",
        SimpleNamespace(
            config=typed_config(compose(words)),
            model_folder=folder,
            token_file=tmp_path / "token",
            log_dir=tmp_path,
            media_folder=tmp_path / "media",
        ),
    )
    command = host._engine_launch(0).command()
    assert command[command.index("--family") + 1] == str(FILE)


def test_a_teacher_may_be_of_it(seed_oss: tuple[Path, Any]) -> None:
    folder, _ = seed_oss
    words = ["algo=distill", f"algo.teachers.default={folder}", f"model.family={FILE}"]
    config = typed_config(compose(["model=folder", f"model.path={folder}", "model.task=arithmetic", *words]))
    assert teacher_folders(config, student=folder) == {"default": folder}


def test_checking_a_folder_names_the_words_that_train_it(
    seed_oss: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_two_words(shutil.copytree(seed_oss[0], tmp_path / "model"))
    assert check_model.main([str(folder)]) == 2
    assert "For one of your own: model.family=/path/my_family.py" in capsys.readouterr().err
    assert check_model.main([str(folder), "--family", str(FILE)]) == 0
    assert f"model=folder model.family={FILE} trains it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: seed_oss computes attention_dropout=0 only"),
        ({"attention_out_bias": True}, "no bias of the attention's output projection"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3: the first must be a multiple"),
    ],
)
def test_what_it_does_not_compute_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    values = {**SIZES, **SETTINGS, "rms_norm_eps": 1e-6, "model_type": "seed_oss"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert folder_architecture(tmp_path, family=str(FILE)).qkv_bias
    (tmp_path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=message):
        folder_architecture(tmp_path, family=str(FILE))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("name='x', qkv_bias='yes'", "SPEC.qkv_bias='yes': give True or False"),
        ("name=''", "a family's name is config.json's model_type"),
        ("name='x', only=[('a', 1)]", "give a tuple of Only"),
    ],
)
def test_a_spec_is_checked_where_it_enters(tmp_path: Path, fields: str, message: str) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(f"from relax_core.contracts.family import Family\nSPEC = Family({fields})\n")
    with pytest.raises(PluginError, match=message):
        find_family(str(file))


def test_what_its_functions_return_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from relax_core.contracts.family import Family\nSPEC = Family(name='seed_oss', experts=lambda config: 8)\n"
    )
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "seed_oss", "rms_norm_eps": 1e-6}))
    with pytest.raises(ValueError, match=r"family seed_oss: experts\(config\) returned 8"):
        folder_architecture(tmp_path, family=str(file))


def test_tied_where_config_json_says_nothing(tmp_path: Path) -> None:
    file = tmp_path / "tied.py"
    file.write_text("from relax_core.contracts.family import Family\nSPEC = Family(name='t', tied_by_default=True)\n")
    values = {**SIZES, "model_type": "t"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert folder_architecture(tmp_path, family=str(file)).tie_word_embeddings
    (tmp_path / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": False}))
    assert not folder_architecture(tmp_path, family=str(file)).tie_word_embeddings
