"""What is searched of a script, and what a candidate is as a command line."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from understudy.cli.configurations import read_entries
from understudy.cli.search_space import FoundSpace, SearchRequest, find_space, uses_ranks
from understudy.errors import UnderstudyError
from understudy.plans.axes import parse_vary
from understudy.simulation.parsers import describe_action, describe_parser

SCRIPT = """\
import torch
LAYERS = 4
optimizer = torch.optim.AdamW(model.parameters())
"""


def describe(parser: argparse.ArgumentParser) -> list[dict[str, object]]:
    return [option for action in parser._actions if (option := describe_action(action)) is not None]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?")
    parser.add_argument("-b", "--batch-size", type=int, default=8, help="of one card")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--attn", choices=("eager", "sdpa"), default="eager")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--gradient-accumulation-steps", type=int, default=1)
    parser.add_argument("--name")
    return parser


def request(*vary: str, arguments: tuple[str, ...] = (), **more: object) -> SearchRequest:
    parsers = describe(make_parser())
    varied = tuple(parse_vary(text) for text in vary)
    return SearchRequest("train.py", arguments, {"train.py": SCRIPT}, parsers=parsers, varied=varied, **more)  # type: ignore[arg-type]


def commands(found: FoundSpace) -> list[str]:
    return [found.write_command(candidate) for candidate in found.space.list_candidates()]


def test_a_parser_as_data() -> None:
    kinds = {str(option["name"]): option["kind"] for option in describe(make_parser())}
    assert kinds == {
        "batch_size": "int", "lr": "float", "checkpoint": "flag", "amp": "switch", "attn": "choice", "tp": "int",
        "gradient_accumulation_steps": "int", "name": "text",
    }  # fmt: skip


def test_options_with_a_meaning_are_searched() -> None:
    found = find_space(request())
    axes = {axis.name: axis.values for axis in found.space.axes}
    assert axes == {
        "batch_size": (1, 2, 4, 8, 16, 32, 64, 128), "checkpoint": (False, True), "amp": (False, True),
        "attn": ("eager", "sdpa"), "fused AdamW": (False, True),
    }  # fmt: skip
    assert found.not_searched == ["lr", "tp", "gradient_accumulation_steps", "name"]


@pytest.mark.parametrize(
    ("name", "choices", "default", "expected"),
    [
        ("precision", ["fp32", "fp16", "bf16", "fp8"], "fp32", ("fp32", "bf16")),
        ("mixed-precision", ["no", "fp16", "bf16"], None, ("no", "bf16")),
        ("optim", ["adamw", "adamw_fused", "sgd"], "adamw", ("adamw", "adamw_fused")),
        ("optim", ["adamw", "sgd"], "adamw", ()),
        ("scheduler", ["none", "bf16"], "none", ()),
        ("precision", None, "fp32", ()),
    ],
)
def test_choices_that_train_the_same_model_are_searched(
    name: str, choices: list[str] | None, default: str | None, expected: tuple[str, ...]
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{name}", choices=choices, default=default)
    found = find_space(replace(request(tries_changes=False), parsers=describe(parser)))
    assert tuple(value for axis in found.space.axes for value in axis.values) == expected


@pytest.mark.parametrize(
    "name",
    "seed data-path log-interval save-every eval-batch-size epochs lr num-workers output-dir vocab-size layers".split(),
)
def test_what_a_model_is_trained_with_is_not_searched(name: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(f"--{name}", type=int, default=8)
    found = find_space(replace(request(tries_changes=False), parsers=describe(parser)))
    assert not found.space.axes
    assert found.not_searched == [name.replace("-", "_")]


def test_layouts_of_several_ranks_are_searched() -> None:
    found = find_space(request(nodes=2, per_node=8, has_ranks=True, tries_changes=False))
    assert {axis.name: axis.values for axis in found.space.axes}["tp"] == (1, 2, 4, 8)


def test_commands_of_candidates() -> None:
    found = find_space(
        request("batch=8,16", "checkpoint", arguments=("--batch-size", "8", "data"), tries_changes=False)
    )
    assert commands(found) == [
        "python train.py --batch-size 8 data",
        "python train.py --batch-size 8 data --checkpoint",
        "python train.py data --batch-size 16",
        "python train.py data --batch-size 16 --checkpoint",
    ]


def test_switches_have_two_words() -> None:
    found = find_space(request("amp", arguments=("--amp",), tries_changes=False))
    assert commands(found) == ["python train.py --no-amp", "python train.py --amp"]


def test_a_switch_whose_value_may_be_left_out() -> None:
    """As `HfArgumentParser` adds fields that are bool."""
    parser = make_parser()
    parser.add_argument("--bf16", type=lambda word: word == "True", nargs="?", const=True, default=False)
    for arguments, kept in (
        (("--bf16", "--name", "x"), "--name x"),
        (("--name", "x", "--bf16"), "--name x"),
        (("--bf16", "True", "--name", "x"), "--name x"),
        (("--bf16=True",), ""),
    ):
        wanted = SearchRequest(
            "train.py", arguments, {"train.py": SCRIPT}, parsers=describe(parser),
            varied=(parse_vary("bf16"),), tries_changes=False,
        )  # fmt: skip
        off = " ".join(("python train.py", *filter(None, (kept, "--bf16 False"))))
        assert commands(find_space(wanted)) == [off, " ".join(("python train.py", *arguments))]


def test_accumulation_follows() -> None:
    found = find_space(request("batch_size=2,4", global_batch=16, tries_changes=False))
    assert commands(found) == [
        "python train.py --batch-size 2 --gradient-accumulation-steps 8",
        "python train.py --batch-size 4 --gradient-accumulation-steps 4",
    ]


def test_marks_words_and_numbers() -> None:
    """Of programs whose parsers nobody can read."""
    plain = replace(request("size=1,2", "model_width=1,2", "layers=4,8", tries_changes=False), parsers=())
    found = find_space(replace(plain, arguments=("--size", "{size}", "model.width=1")))
    candidate = found.space.list_candidates()[-1]
    assert found.write_command(candidate) == "python train.py --size 2 model.width=2"
    assert found.write_patch(candidate) == "# set layers = 8"
    assert "LAYERS = 8" in found.make_variant(candidate).files["train.py"]


def test_changes_of_the_text() -> None:
    found = find_space(request("batch=8"))
    plain, fused = found.space.list_candidates()
    assert found.find_first([fused, plain]) == plain
    assert not found.make_variant(plain).files
    assert "fused=True" in found.make_variant(fused).files["train.py"]
    assert "+optimizer = torch.optim.AdamW(model.parameters(), fused=True)" in found.write_patch(fused)


def test_ranks_and_their_launcher() -> None:
    found = find_space(
        request("nproc_per_node=4,8", nodes=2, per_node=8, has_ranks=True, tries_changes=False)
    )
    candidate = found.space.list_candidates()[0]
    assert found.write_command(candidate) == "torchrun --nnodes 2 --nproc-per-node 4 train.py"
    assert found.make_variant(candidate).options == (
        "--nproc-per-node",
        "4",
        "--nnodes",
        "2",
        "--ranks",
        "classes",
    )


def test_options_of_accelerate() -> None:
    launcher = ("accelerate", "launch", "--use_fsdp")
    found = find_space(
        request(
            "fsdp_sharding_strategy=FULL_SHARD,SHARD_GRAD_OP",
            launcher=launcher,
            has_ranks=True,
            per_node=8,
            tries_changes=False,
        )
    )
    assert commands(found) == [
        f"accelerate launch --use_fsdp --fsdp_sharding_strategy {name} train.py"
        for name in ("FULL_SHARD", "SHARD_GRAD_OP")
    ]


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ("depth=1,2", "--vary depth: not found: train.py has no option, word or number of this name; write {depth} where it "
         "stands in the command line"),
        ("attn=flash", "--vary attn: invalid choice 'flash' (choose from eager, sdpa)"),
        ("lr=none", "--vary lr: expected numbers, got none"),
        ("checkpoint=2", "--vary checkpoint: expected on or off (an option without a value), got 2"),
        ("name", "--vary name: expected values, as in name=1,2,4"),
        ("nodes=1,2", "--vary nodes: expected a script with several ranks, got one that runs on one card"),
    ],
)  # fmt: skip
def test_wrong_names(vary: str, message: str) -> None:
    with pytest.raises(UnderstudyError) as caught:
        find_space(request(vary))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("launcher", "axis"),
    [
        (("accelerate", "launch", "--use_fsdp", "--fsdp_sharding_strategy=SHARD_GRAD_OP"),
         ("fsdp_sharding_strategy", ("FULL_SHARD", "SHARD_GRAD_OP"), "SHARD_GRAD_OP")),
        (("accelerate", "launch", "--config_file", "fsdp.yaml"), ("fsdp_reshard_after_forward", (True, False), False)),
    ],
)  # fmt: skip
def test_how_accelerate_shards_is_searched(
    launcher: tuple[str, ...], axis: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("fsdp.yaml").write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_reshard_after_forward: false\n"
    )
    found = find_space(request(launcher=launcher, has_ranks=True, per_node=8, tries_changes=False))
    (last,) = (axis for axis in found.space.axes if axis.origin == "launcher")
    assert (last.name, last.values, found.setters[last.name].start) == axis
    assert not find_space(request(launcher=("accelerate", "launch"), tries_changes=False)).setters.keys() & {
        last.name
    }


def test_a_value_of_the_launcher_is_replaced() -> None:
    launcher = ("accelerate", "launch", "--mixed_precision", "no", "--use_fsdp")
    found = find_space(
        request("mixed_precision=no,bf16", launcher=launcher, has_ranks=True, tries_changes=False)
    )
    assert commands(found) == [
        "accelerate launch --mixed_precision no --use_fsdp train.py",
        "accelerate launch --use_fsdp --mixed_precision bf16 train.py",
    ]


TOML = """\
[training]
batch_size = 2  # of a card
seq_len = 64
[checkpoint]
batch_size = 7
enable = false
[activation_checkpoint]
mode = 'selective'
"""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.toml", TOML),
        ("c.yaml", "training: {batch_size: 2}\ncheckpoint:\n  batch_size: 7\nactivation_checkpoint:\n  mode: selective\n"),
        ("c.json", '{"training": {"batch_size": 2}, "checkpoint": {"batch_size": 7},'
                   ' "activation_checkpoint": {"mode": "selective"}}'),
    ],
)  # fmt: skip
def test_entries_of_a_configuration_file(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is not changed: a rehearsal gets a text of its own."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    plain = replace(request(arguments=("--config", name), tries_changes=False), parsers=())
    found = find_space(plain)
    assert {axis.name: axis.values[:2] for axis in found.space.axes} == {
        "training_batch_size": (1, 2), "activation_checkpoint_mode": ("none", "selective"),
    }  # fmt: skip
    first, *_, last = found.space.list_candidates()
    assert found.write_patch(last) == (
        f"# in {name}: set training.batch_size = 64\n# in {name}: set activation_checkpoint.mode = full"
    )
    (changed,) = found.make_variant(last).configurations.values()
    assert read_entries(changed, name) == {
        **read_entries(text, name), "training.batch_size": 64, "activation_checkpoint.mode": "full",
    }  # fmt: skip
    assert found.write_command(first) == f"python train.py --config {name}"
    found = find_space(replace(plain, varied=(parse_vary("mode=none,full"),)))
    assert found.setters["mode"].option == "activation_checkpoint.mode"


def test_an_option_has_the_value_of_the_configuration_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("batch_size: 2\n")
    found = find_space(request("batch-size=2,8", arguments=("--config", "c.yaml"), tries_changes=False))
    assert commands(found) == [
        "python train.py --config c.yaml",
        "python train.py --config c.yaml --batch-size 8",
    ]


def test_options_of_commands_and_of_the_parser_above() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--amp", action="store_true")
    commands_of = parser.add_subparsers()
    commands_of.add_parser("train").add_argument("--batch", type=int, default=1)
    commands_of.add_parser("test").add_argument("--batch", type=int, default=9)
    found = find_space(
        replace(
            request("amp=on", "batch=2", arguments=("train",), tries_changes=False),
            parsers=list(describe_parser(parser, ["train"])),
        )
    )
    assert commands(found) == ["python train.py --amp train --batch 2"]


def test_words_of_parsers_that_can_not_be_read() -> None:
    plain = replace(request("batch=1,2", "amp=on", tries_changes=False), parsers=())
    found = find_space(replace(plain, arguments=("--batch", "1", "--amp=off")))
    assert commands(found) == ["python train.py --batch 1 --amp=true", "python train.py --batch 2 --amp=true"]


def test_a_module_is_run_as_one() -> None:
    found = find_space(
        request("batch=8", module="project.train", has_ranks=True, per_node=2, tries_changes=False)
    )
    candidate = found.space.list_candidates()[0]
    assert found.write_command(candidate) == "torchrun --nproc-per-node 2 -m project.train"
    assert found.make_variant(candidate).module == "project.train"


def test_programs_for_several_cards() -> None:
    assert uses_ranks({"a.py": "dist.init_process_group('nccl')"})
    assert uses_ranks({"a.py": "from transformers import Trainer"})
    assert not uses_ranks({"a.py": "model = Net().cuda()"})
