"""Mutants that break promises about several processes."""

from __future__ import annotations

from mutants.mutant import Mutant

FIT = "kfac/fit.py"
RANKS_CLI = "cli/test_ranks.py::"
RANKS = "_torch/test_distributed.py::"

PROCESSES = [
    Mutant(
        "items go round",
        "_torch/distributed.py",
        "return number % self.size == self.rank",
        "return True",
        f"{RANKS}test_items_are_assigned_round_robin",
    ),
    Mutant(
        "the sums of all ranks",
        "_torch/distributed.py",
        "dist.all_reduce(moved)",
        "pass",
        f"{RANKS}test_several_ranks_give_the_posterior_of_one[2]",
    ),
    Mutant(
        "the second pass of all ranks",
        FIT,
        "moments.reduce(world)",
        "pass",
        f"{RANKS}test_several_ranks_give_the_posterior_of_one[2]",
    ),
    Mutant(
        "one rank writes",
        "pipeline/predict.py",
        "    if world.rank:",
        "    if False:",
        f"{RANKS_CLI}test_ranks_write_the_file_of_one_process[3]",
    ),
    Mutant(
        "a rank that dies ends the others",
        "_torch/distributed.py",
        "except RuntimeError as error:",
        "except ZeroDivisionError as error:",
        f"{RANKS_CLI}test_killed_rank_ends_all_and_leaves_whole_blocks",
    ),
    Mutant(
        "errors name their rank",
        "_torch/distributed.py",
        "            if self.is_single:\n                raise\n",
        "            if True:\n                raise\n",
        f"{RANKS_CLI}test_errors_name_their_rank",
    ),
    Mutant(
        "folders that are not shared",
        "pipeline/block_store.py",
        "            if not path.exists():\n                raise",
        "            if False:\n                raise",
        f"{RANKS_CLI}test_folder_that_is_not_shared_is_an_error",
    ),
    Mutant(
        "where tensors travel",
        "_torch/distributed.py",
        ' and (device.type == "cpu" or backend != "gloo")',
        "",
        f"{RANKS}test_transfer_device_is_one_of_the_backend",
    ),
    Mutant(
        "a GPU of its own",
        "_torch/distributed.py",
        "if local_rank >= count:",
        "if False:",
        f"{RANKS}test_each_process_has_its_own_gpu",
    ),
    Mutant(
        "one rank speaks",
        "cli/fit.py",
        "if not is_main_process():",
        "if False:",
        f"{RANKS}test_torchrun",
    ),
]
