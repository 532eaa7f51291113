from pathlib import Path
from typing import Any

import msgspec
import pytest

from omnistage.config.model import OmniConfig
from omnistage.config.resolve import resolve_config
from omnistage.errors import ConfigError


def write(folder: Path, text: str) -> Path:
    file = folder / "deploy.yaml"
    file.write_text(text)
    return file


def test_every_value_has_an_origin_and_layers_win_in_order(tmp_path: Path) -> None:
    file = write(tmp_path, "stage_defaults: {max_num_seqs: 3}\nstages:\n  wave: {chunk_frames: 7, max_num_seqs: 5}\n")
    config = resolve_config("echo3", file, {"token_budget": 64, "stages": {"talker": {"token_budget": 32}}})
    assert [config.stages[s].max_num_seqs for s in ("thinker", "wave")] == [3, 5]
    assert [config.stages[s].token_budget for s in ("thinker", "talker", "wave")] == [64, 32, 64]
    assert config.stages["wave"].options["chunk_frames"] == 7
    assert config.origins["stages.wave.chunk_frames"] == "deploy.yaml:3"
    assert config.origins["stages.thinker.max_num_seqs"] == "deploy.yaml:1"
    assert config.origins["stages.talker.token_budget"] == "override stages.talker.token_budget"
    assert config.origins["stages.talker.kv_memory_mb"] == "pipeline"
    assert config.origins["limits.max_queue"] == "default"


def test_a_typed_flag_beats_the_file_and_an_untouched_default_does_not(tmp_path: Path) -> None:
    file = write(tmp_path, "stages: {talker: {dtype: bfloat16}}\n")
    assert resolve_config("echo3", file).stages["talker"].dtype == "bfloat16"
    assert resolve_config("echo3", file, {"dtype": "float32"}).stages["talker"].dtype == "float32"


def test_platform_overlay_applies_on_this_platform_only(tmp_path: Path) -> None:
    text = "stages: {wave: {threads: 1}}\nplatforms:\n"
    text += "  cpu: {stages: {wave: {threads: 2}}}\n  cuda: {stages: {wave: {threads: 9}}}\n"
    config = resolve_config("echo3", write(tmp_path, text))
    assert config.stages["wave"].threads in (2, 9)
    assert "platform" in config.origins["stages.wave.threads"]


def test_resolved_configuration_is_plain_data() -> None:
    config = resolve_config("echo3")
    assert msgspec.json.decode(msgspec.json.encode(config), type=OmniConfig) == config


def test_whole_payload_edge_and_threads_auto(tmp_path: Path) -> None:
    text = "stages: {wave: {threads: auto}}\nedges: {talker->wave: {async_chunk: false, deadline_s: 2.5}}\n"
    config = resolve_config("echo3", write(tmp_path, text))
    assert config.edges["talker->wave"].async_chunk is False
    assert config.edges["talker->wave"].deadline_s == 2.5
    assert config.stages["wave"].threads == 0


WRONG: list[tuple[str, str]] = [
    ("stges: {wave: {threads: 1}}", r"'stges'; did you mean 'stages'\? \(deploy.yaml:1\)"),
    ("stages:\n  wav: {threads: 1}", r"'wav'; did you mean 'wave'\? \(deploy.yaml:2\)"),
    ("stages:\n  wave:\n    thread: 1", r"'thread'; did you mean 'threads'\? \(deploy.yaml:3\)"),
    ("stages: {wave: {threads: -1}}", r"stages.wave.threads: -1 is not valid.*>= 0"),
    ("stages: {wave: {threads: many}}", r"stages.wave.threads: 'many' is not valid"),
    ("stages: {wave: {dtype: float23}}", r"'float23' is not valid: did you mean 'float32'\?"),
    ("stages: {wave: {placement: remote}}", r"'remote' is not valid: use one of inline, process|did you mean"),
    ("stages: {wave: {replicas: 0}}", r"stages.wave.replicas: 0 is not valid"),
    ("stages: {wave: {chunk_frames: 0}}", r"chunk_frames: 0 is not within 1\.\."),
    ("stages: {wave: {chunk_frames: big}}", r"chunk_frames: 'big' is not valid"),
    ("stages: {thinker: {chunk_frames: 4}}", r"'chunk_frames'"),
    ("stages: {wave: fast}", r"stages.wave: 'fast' is not a mapping"),
    ("stages: {talker: {with: thinker}}", r"stages.talker.with: 'thinker' needs placement: inline"),
    ("stages: {talker: {placement: inline, with: speaker}}", r"no other stage 'speaker'"),
    ("stages: {talker: {placement: inline, with: thinker, replicas: 2}}", r"2 replicas, thinker has 1; make"),
    ("edges: {talker->thinker: {deadline_s: 3}}", r"'talker->thinker'; did you mean"),
    ("edges: {talker->wave: {deadline: 3}}", r"'deadline'; did you mean 'deadline_s'"),
    ("edges: {talker->wave: {max_inflight: 0}}", r"max_inflight: 0 is not valid"),
    ("sampling: {thinker: {temprature: 1}}", r"'temprature'; did you mean 'temperature'"),
    ("sampling: {thinker: {temperature: 9}}", r"temperature: 9 is not valid.*<= 2"),
    ("sampling: {wave: {top_k: 1}}", r"stage wave \(generation\) does not sample"),
    ("limits: {max_queue: 0}", r"limits.max_queue: 0 is not valid"),
    ("limits: {max_body: 3}", r"'max_body'; did you mean 'max_body_mb'"),
    ("trace: {otlp: 'collector:4318'}", r"trace.otlp: 'collector:4318' is not valid: .*http"),
    ("stages: {wave: {device: 'cuda:banana'}}", r"stages.wave.device: 'cuda:banana' is not valid"),
    ("variant: fast", r"variant: unknown key or name 'fast'; known: default"),
    ("pipeline: echo4", r"'echo4'; did you mean 'echo3'"),
    ("platforms: {tpu: {stages: {}}}", r"platforms: unknown key or name 'tpu'"),
    ("stages: {wave: {threads: 1, threads: 2}}", r"deploy.yaml:1: key 'threads' stands twice"),
    ("stages: {wave: {quantization: int4}}", r"stages.wave.quantization: int4 is not supported by this stage"),
    ("stages: {talker: {tensor_parallel: 2}}", r"stages.talker.tensor_parallel: 2 is not supported"),
    ("stages: {talker: {quantization: int8}}", r"quantization: 'int8' is not valid: did you mean 'int4'"),
    ("stages: [1, 2]", r"stages: .* is not a mapping"),
    ("- a\n- b", r"must be a mapping"),
    ("stages: {wave: {", r"deploy file deploy.yaml: "),
    ("stages: {wave: {faults: [{point: nowhere, action: kill}]}}", r"'nowhere'"),
    ("served_name: !!python/object/apply:os.system [ls]", r"could not determine a constructor"),
]


def test_a_misspelt_stage_with_nothing_in_it_is_refused_not_ignored(tmp_path: Path) -> None:
    for section, near in (("stages", "wave"), ("edges", "talker->wave"), ("sampling", "talker")):
        for nothing in ("{}", ""):
            text = f"{section}:\n  {near[:-1]}: {nothing}\n"
            message = rf"{section}: unknown key or name '{near[:-1]}'; did you mean '{near}'\? \(deploy.yaml:2\)"
            with pytest.raises(ConfigError, match=message):
                resolve_config("echo3", write(tmp_path, text))
        with pytest.raises(ConfigError, match=rf"did you mean '{near}'\? \(override {section}"):
            resolve_config("echo3", overrides={section: {near[:-1]: {}}})
    assert resolve_config("echo3", write(tmp_path, "stages: {wave: {}}")).stages == resolve_config("echo3").stages


@pytest.mark.parametrize(("text", "message"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong_configuration_names_key_value_place_and_fix(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_config("echo3", write(tmp_path, text))
    assert "\n" not in caught.value.info.message


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("ecko3", "no folder, no hub id and no built-in name"),
        ("/no/such/folder", "no folder"),
    ],
)
def test_unknown_model_is_named(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_config(model)


def test_folder_without_a_config_and_with_an_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has none of model_index.json"):
        resolve_config(str(tmp_path))
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"]}')
    with pytest.raises(ConfigError, match="no pipeline serves architecture NoSuchModel"):
        resolve_config(str(tmp_path))


def test_missing_deploy_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: No such file"):
        resolve_config("echo3", "nowhere.yaml")


@pytest.mark.parametrize("override", [{"stages.wave.thread": 1}, {"nothing": 1}, {"stages": {"wave": {"x": 1}}}])
def test_unknown_override_is_an_error(override: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"unknown key or name .*\(override"):
        resolve_config("echo3", None, override)


def test_a_process_of_its_own_undoes_the_co_location_that_the_pipeline_chose(tmp_path: Path) -> None:
    folder = Path(__file__).parent.parent / "models" / "hunyuan_image3" / "data"
    assert resolve_config(str(folder)).stages["dit"].co_located_with == "ar"
    apart = resolve_config(str(folder), write(tmp_path, "stages: {dit: {placement: process}}"))
    assert (apart.stages["dit"].placement, apart.stages["dit"].co_located_with) == ("process", "")
    with pytest.raises(ConfigError, match="needs placement: inline"):
        resolve_config(str(folder), write(tmp_path, "stages: {dit: {with: ar, placement: process}}"))
