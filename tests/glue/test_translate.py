"""From engine arguments and flags to vLLM's own terms; what cannot work is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from medusa_plugin.config import MedusaConfigError
from medusa_plugin.embedded import embedded_heads_path, ensure_embedded_model
from medusa_plugin.vllm_glue import support, translate
from medusa_plugin.vllm_glue.support import UnsupportedFeatureError

HEADS = str(embedded_heads_path())


def engine_args(**options: Any) -> EngineArgs:
    return EngineArgs(model=str(ensure_embedded_model(progress=False)), **options)


def speculative(**options: Any) -> dict[str, Any]:
    return {"method": "medusa", "model": HEADS, **options}


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": speculative(num_speculative_tokens=7)},
        {"spec_method": "medusa", "spec_model": HEADS, "spec_tokens": 7},
        {
            "speculative_config": {"method": "medusa", "num-speculative-tokens": 7},
            "additional_config": {"medusa": {"heads": HEADS}},
        },
    ],
)
def test_every_spelling_is_translated(options: dict[str, Any]) -> None:
    args = engine_args(**options)
    translate.translate_engine_args(args)
    assert args.speculative_config == {
        "method": "custom_class",
        "model": translate.PROPOSER,
        "num_speculative_tokens": 7,
    }
    assert args.worker_cls == translate.CPU_WORKER
    assert args.scheduler_cls == translate.SCHEDULER
    assert args.additional_config["medusa"]["heads"] == HEADS
    json.dumps(args.additional_config)  # vLLM hashes it
    once = dict(args.speculative_config)
    translate.translate_engine_args(args)  # the same object may come again
    assert args.speculative_config == once


@pytest.mark.parametrize("config", [None, {"method": "ngram", "num_speculative_tokens": 3}])
def test_other_methods_are_left_alone(config: dict[str, Any] | None) -> None:
    args = engine_args(speculative_config=config, additional_config={"other": 1})
    translate.translate_engine_args(args)
    assert args.speculative_config == config
    assert args.additional_config == {"other": 1}
    assert (args.worker_cls, args.scheduler_cls) == ("auto", None)


def test_the_tree_gives_the_number_of_tokens() -> None:
    args = engine_args(
        speculative_config=speculative(),
        additional_config={"medusa": {"tree": [[0], [1], [0, 0]]}},
    )
    translate.translate_engine_args(args)
    assert args.speculative_config["num_speculative_tokens"] == 3


def test_default_size_and_heads_of_the_embedded_model() -> None:
    args = engine_args(speculative_config={"method": "medusa"})
    translate.translate_engine_args(args)
    assert args.speculative_config["num_speculative_tokens"] == translate.DEFAULT_NUM_NODES
    assert args.additional_config["medusa"]["heads"] == HEADS


def test_heads_beside_the_model(tmp_path: Path) -> None:
    (tmp_path / "medusa").mkdir()
    (tmp_path / "medusa" / "medusa_lm_head.safetensors").write_bytes(b"")
    assert translate.find_heads(str(tmp_path)) == tmp_path / "medusa"


@pytest.mark.parametrize(
    ("config", "additional", "message"),
    [
        (speculative(num_speculative_tokens=2), {"tree": [[0], [1], [2]]}, "is 2, but.*3 nodes"),
        (speculative(treee=1), {}, "unknown option 'treee'"),
        (speculative(), {"heads": "elsewhere"}, "'heads' is .*give it once"),
        (speculative(), "text", "must be a dict"),
        (speculative(), {"tree": [[0], [1, 0]]}, r"\[1, 0\]"),
        (speculative(), {"tree": [[0], [0, 0], [0] * 3, [0] * 4, [0] * 5]}, "5 deep.*4 heads"),
        ({"method": "medusa", "model": "/nowhere"}, {}, "/nowhere"),
        (speculative(heads="/other"), {}, "'heads' is '/other'.*give it once"),
        (speculative(draft_vocab_size=0), {}, "'draft_vocab_size'.*greater than or equal to 1"),
        (speculative(tree=""), {}, "empty text"),
        (speculative(tree="static", lookup=True), {}, "lookup adds branches to dynamic trees"),
        (speculative(sizes="big"), {}, "'sizes'.*'big'"),
        (speculative(tree='{"a": 1}'), {}, "exactly one of the keys medusa_choices"),
    ],
)
def test_contradictions_and_mistakes_are_named(
    config: dict[str, Any], additional: Any, message: str
) -> None:
    args = engine_args(speculative_config=config, additional_config={"medusa": additional})
    with pytest.raises(ValueError, match=message):
        translate.translate_engine_args(args)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"spec_tokens": 9, "speculative_config": speculative(num_speculative_tokens=4)}, "once"),
        ({"spec_model": "/other", "speculative_config": speculative()}, "'model' is.*give it once"),
        ({"additional_config": {"medusa": {"heads": HEADS}}}, "is not on"),
        (
            {"speculative_config": {"method": "custom_class", "model": translate.PROPOSER}},
            "use {'method': 'medusa'",
        ),
    ],
)
def test_options_that_would_be_overruled_or_ignored(options: dict[str, Any], message: str) -> None:
    with pytest.raises(MedusaConfigError, match=message):
        translate.translate_engine_args(engine_args(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_vocab_size": 99999}, "99999.*rank 4096"),
        ({"draft_vocab_size": 2, "tree": [[0], [1], [2]]}, "up to rank 2.*offers only 2"),
    ],
)
def test_draft_vocabulary_is_checked_before_weights(options: dict[str, Any], message: str) -> None:
    args = engine_args(speculative_config=speculative(**options), max_model_len=512)
    with pytest.raises(MedusaConfigError, match=message):
        args.create_engine_config()


def test_heads_that_vllm_recognises_by_itself_need_the_method(tmp_path: Path) -> None:
    """Otherwise vLLM 0.32 would run its own top-1 chain in silence."""
    config = {"model_type": "medusa", "hidden_size": 576, "vocab_size": 49152, "num_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = engine_args(
        speculative_config={"model": str(tmp_path), "num_speculative_tokens": 4}, max_model_len=512
    )
    with pytest.raises(MedusaConfigError, match="add 'method': 'medusa'"):
        args.create_engine_config()


def test_no_heads_anywhere(tmp_path: Path) -> None:
    with pytest.raises(MedusaConfigError, match="--medusa-heads"):
        translate.find_heads(str(tmp_path))


@pytest.mark.parametrize("part", ["worker", "scheduler"])
def test_another_class_than_ours_is_refused(part: str) -> None:
    args = engine_args(speculative_config=speculative(), **{f"{part}_cls": "some.Class"})
    with pytest.raises(MedusaConfigError, match=rf"--{part}-cls some\.Class .*its own {part}"):
        translate.translate_engine_args(args)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        (
            {"tensor_parallel_size": 3, "pipeline_parallel_size": 2},
            r"yet: pipeline_parallel_size=2 \(only 1\)\. Turn",
        ),
        (
            {"tensor_parallel_size": 3, "distributed_executor_backend": "external_launcher"},
            "external_launcher",
        ),
        ({"data_parallel_size": 2}, "data_parallel_size=2"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype=float16.*bfloat16"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
        (
            {"structured_outputs_config": StructuredOutputsConfig(backend="lm-format-enforcer")},
            "lm-format-enforcer",
        ),
        ({"hf_overrides": {"layer_types": ["chunked_attention"]}}, "chunked_attention"),
        (
            {"hf_overrides": {"layer_types": ["full_attention", "sliding_attention"]}},
            "--disable-hybrid-kv-cache-manager",
        ),
    ],
)
def test_unsupported_features_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    args = engine_args(speculative_config=speculative(), max_model_len=512, **options)
    with pytest.raises(UnsupportedFeatureError, match=name):
        args.create_engine_config()


def test_async_scheduling_is_refused_by_vllm() -> None:
    """Its placeholders are no trees; where it was not asked for, it is off."""
    args = engine_args(speculative_config=speculative(), max_model_len=512, async_scheduling=True)
    with pytest.raises(ValueError, match="async scheduling is only supported"):
        args.create_engine_config()
    args = engine_args(speculative_config=speculative(), max_model_len=512)
    assert args.create_engine_config().scheduler_config.async_scheduling is False


def test_sleep_mode_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU vLLM refuses it itself."""
    with pytest.raises(ValueError, match="Sleep mode is not supported"):
        engine_args(speculative_config=speculative(), enable_sleep_mode=True).create_engine_config()
    config = engine_args(speculative_config=speculative(), max_model_len=512).create_engine_config()
    gpu = SimpleNamespace(is_cpu=lambda: False, is_cuda=lambda: True)
    monkeypatch.setattr(support, "current_platform", gpu)
    config.model_config.dtype = torch.bfloat16
    support.require_supported_engine(config)
    config.model_config.enable_sleep_mode = True
    with pytest.raises(UnsupportedFeatureError, match="sleep mode"):
        support.require_supported_engine(config)


@pytest.mark.parametrize(
    "limit", ["max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold"]
)
def test_limits_below_one_tree_are_refused(limit: str) -> None:
    """A padded request would never be scheduled, or end the engine by an assertion."""
    options = {"max_num_batched_tokens": 512, limit: 32}
    args = engine_args(
        speculative_config=speculative(num_speculative_tokens=40),
        max_model_len=64,
        max_num_seqs=1,
        **options,
    )
    with pytest.raises(ValueError, match=f"{limit}=32, less than the 41 rows"):
        args.create_engine_config()


def test_the_lossy_default_is_announced(warnings: list[str]) -> None:
    engine_args(speculative_config=speculative(), max_model_len=512).create_engine_config()
    assert not [message for message in warnings if "typical" in message]
    options = {"acceptance": "typical", "typical_alpha": 0.25}
    config = engine_args(
        speculative_config=speculative(**options), max_model_len=512
    ).create_engine_config()
    assert translate.medusa_config(config).acceptance == "typical"
    [message] = [message for message in warnings if "typical" in message]
    assert "LOSSY" in message
    assert "epsilon 0.09, alpha 0.25" in message


def test_the_lossy_default_excludes_custom_processors() -> None:
    args = engine_args(
        speculative_config=speculative(acceptance="typical"),
        logits_processors=["some.module:Processor"],
        max_model_len=512,
    )
    with pytest.raises(MedusaConfigError, match=r"'typical'.*logits processor some\.module"):
        args.create_engine_config()


def test_heads_of_another_model_are_refused_before_weights(tmp_path: Path) -> None:
    model = ensure_embedded_model(progress=False)
    config = json.loads((model / "config.json").read_text())
    config |= {
        "hidden_size": 512,
        "head_dim": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = EngineArgs(model=str(tmp_path), speculative_config=speculative(), max_model_len=512)
    with pytest.raises(ValueError, match=r"576.*512|512.*576"):
        args.create_engine_config()


def parse(*flags: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    model = str(ensure_embedded_model(progress=False))
    return EngineArgs.from_cli_args(parser.parse_args(["--model", model, *flags]))


def test_flags() -> None:
    args = parse(
        "--speculative-model", "medusa", "--medusa-heads", HEADS, "--num-speculative-tokens", "9",
        "--medusa-draft-vocab-size", "4096", "--medusa-tree", "[[0]]",
        "--medusa-acceptance", "typical", "--medusa-typical-epsilon", "0.1",
        "--medusa-typical-alpha", "1",
    )  # fmt: skip
    assert args.speculative_config == {
        "method": "medusa",
        "heads": HEADS,
        "num_speculative_tokens": 9,
        "tree": "[[0]]",
        "draft_vocab_size": 4096,
        "acceptance": "typical",
        "typical_epsilon": 0.1,
        "typical_alpha": 1.0,
    }


def test_flags_not_given_leave_no_trace() -> None:
    """`LLM(**vars(args))` is a common pattern: extra names would break it."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    namespace = vars(parser.parse_args([]))
    assert not [n for n in namespace if "medusa" in n or n == "speculative_model"]


def test_no_flags_change_nothing() -> None:
    args = parse()
    assert args.speculative_config is None
    assert args.additional_config == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--medusa-heads", "d"], "--medusa-heads needs --speculative-model medusa"),
        (["--num-speculative-tokens", "3"], "--num-speculative-tokens needs"),
        (
            ["--speculative-model", "medusa", "--spec-tokens", "4"],
            "--speculative-model and --spec-tokens are mutually exclusive",
        ),
        (
            ["--speculative-model", "medusa", "--speculative-config", '{"method": "ngram"}'],
            "--speculative-config are mutually exclusive",
        ),
    ],
)
def test_flags_without_effect_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(MedusaConfigError, match=message):
        parse(*flags)


@pytest.mark.parametrize(
    "flag",
    [
        "--speculative-model",
        "--medusa-draft-vocab-size",
        "--medusa-acceptance",
        "--medusa-typical-alpha",
    ],
)
def test_bad_values_of_flags(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(flag, "bogus")
    assert "bogus" in capsys.readouterr().err
