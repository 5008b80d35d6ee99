"""Mutants that break promises about long runs."""

from __future__ import annotations

from mutants.mutant import Mutant

CHECKPOINT = "kfac/test_checkpoint.py::"
DISKS = "kfac/test_checkpoint_files.py::"
KEEPER = "kfac/checkpoint.py"
PASSES = "kfac/passes.py"
FILES = "_files/output_file.py"
FULL = "kfac/test_checkpoint_files.py::test_a_full_disk_keeps_the_previous_checkpoint"
FULL_OUT = "test_provenance.py::test_a_full_disk_is_an_error_and_leaves_no_partial_file"
INTERVAL = "kfac/test_checkpoint.py::test_checkpoints_at_the_interval_and_on_an_error"
LOADING = "data/test_loader.py::"
RANKS_CLI = "cli/test_ranks.py::"
UNWRITABLE = "cli/test_unwritable.py::"

FITS = [
    Mutant("written beside", FILES, "temporary = Path(name)", "temporary = path", FULL),
    Mutant("flushed to the disk", FILES, "os.fsync(written.fileno())", "pass", FULL),
    Mutant("the folder flushed", FILES, "   _sync_folder(path.parent)", "   pass", FULL),
    Mutant(
        "kept at an interval",
        PASSES,
        "monotonic() - self._saved_at >= every:",
        "False:",
        INTERVAL,
    ),
    Mutant(
        "an error leaves a checkpoint",
        PASSES,
        "is more useful\n                        self.save()",
        "is more useful\n                        pass",
        INTERVAL,
    ),
    Mutant(
        "no part of an item is kept",
        PASSES,
        " or self._is_partial",
        "",
        f"{CHECKPOINT}test_a_half_counted_item_is_not_saved",
    ),
    Mutant(
        "the second pass is kept",
        KEEPER,
        "(own, second_pass_path(own))[:count]",
        "(own,)",
        f"{CHECKPOINT}test_an_interrupted_second_pass_resumes[8]",
    ),
    Mutant(
        "other bases are refused",
        "kfac/ekfac.py",
        '"basis": digest.hexdigest()',
        '"basis": ""',
        f"{CHECKPOINT}test_a_second_pass_in_other_bases_is_refused",
    ),
    Mutant(
        "each item once",
        PASSES,
        "self._last_item = item\n        return remaining",
        "self._last_item = item\n        return self.items.starting_at(self.next_item - 1)",
        f"{CHECKPOINT}test_fit_resumes_after_an_interrupt_at_any_item[4]",
    ),
    Mutant(
        "drawn targets have a seed of each item",
        "kfac/losses.py",
        "item_seed(sample_seed, number)",
        "torch.seed()",
        f"{CHECKPOINT}test_an_interrupted_fit_resumes_to_the_same_bytes[mc]",
    ),
    Mutant(
        "an item that is not counted is not kept",
        PASSES,
        "self._is_partial = True  # until",
        "pass  # until",
        f"{CHECKPOINT}test_an_added_item_that_is_not_counted_is_not_saved",
    ),
    Mutant(
        "SIGTERM ends with 143",
        "cli/app.py",
        "sys.exit(128 + number)",
        "sys.exit(1)",
        "cli/test_fit.py::test_interrupted_fit_resumes",
    ),
    Mutant(
        "another fit is refused",
        KEEPER,
        '_check_settings(header["settings"], settings)\n        for',
        "for",
        f"{CHECKPOINT}test_other_weights_are_refused",
    ),
    Mutant(
        "other data are refused",
        PASSES,
        "if hash_item(item) != self._item_hash:",
        "if False:",
        f"{CHECKPOINT}test_a_checkpoint_of_another_fit_is_refused",
    ),
    Mutant(
        "a checkpoint in the way stays",
        KEEPER,
        "if path.exists() and not self.resume:",
        "if False:",
        f"{CHECKPOINT}test_an_existing_checkpoint_is_not_overwritten",
    ),
    Mutant(
        "what a kill left half written goes",
        KEEPER,
        "remove_leftovers(path)",
        "pass",
        f"{DISKS}test_partial_files_of_a_killed_run_are_removed",
    ),
    Mutant(
        "a read-only folder before the fit",
        KEEPER,
        "check_writable(path)",
        "pass",
        f"{DISKS}test_missing_and_read_only_folders_fail_before_the_work",
    ),
    Mutant(
        "a full disk is a clear error",
        FILES,
        "yield\n    except OSError as error:",
        "yield\n    except ZeroDivisionError as error:",
        FULL,
    ),
    Mutant(
        "a full disk at the end of a fit loses nothing",
        PASSES,
        "self.save()  # what follows",
        "pass  # what follows",
        f"{FULL_OUT}[fit]",
    ),
    Mutant(
        "no half file", FILES, "temporary.unlink(missing_ok=True)", "pass", f"{FULL_OUT}[predict]"
    ),
    Mutant(
        "a full disk at the end of predict loses nothing",
        "pipeline/predict.py",
        "    write_detections(options.format, options.out, frames, found, options.message)\n",
        "    store.remove()\n"
        "    write_detections(options.format, options.out, frames, found, options.message)\n",
        f"{FULL_OUT}[predict]",
    ),
    Mutant(
        "predict makes no block twice",
        "pipeline/block_store.py",
        "if not self.has_block(numbers.start, meta):",
        "if True:",
        "cli/test_predict.py::test_interrupted_run_resumes_to_the_same_bytes[exact]",
    ),
    Mutant(
        "blocks of another run are refused",
        "pipeline/paths.py",
        "if before != value:",
        "if False:",
        "cli/test_predict.py::test_interrupted_run_resumes_to_the_same_bytes[exact]",
    ),
    Mutant(
        "evaluate leaves nothing behind",
        "pipeline/evaluate.py",
        "store.remove()",
        "pass",
        f"{RANKS_CLI}test_interrupted_evaluate_resumes",
    ),
    Mutant(
        "reproduce makes no run twice",
        "pipeline/reproduce/workspace.py",
        "if not path.exists():\n            self._execute(run)",
        "if True:\n            self._execute(run)",
        "pipeline/test_reproduce.py::test_finished_runs_are_not_repeated",
    ),
    Mutant(
        "reproduce goes on with a fit",
        "pipeline/reproduce/workspace.py",
        "checkpoint=Checkpoint(checkpoint, resume=True),",
        "",
        "pipeline/test_reproduce.py::test_interrupted_fit_resumes_and_leaves_nothing",
    ),
    Mutant(
        "reproduce removes what a kill left",
        "pipeline/reproduce/workspace.py",
        "leftover.unlink()",
        "pass",
        "pipeline/test_reproduce.py::test_interrupted_fit_resumes_and_leaves_nothing",
    ),
    Mutant(
        "every item has a seed",
        "data/loader.py",
        "with _seeded(item_seed(self.seed, index)):",
        "if True:",
        f"{LOADING}test_items_do_not_depend_on_workers[2]",
    ),
    Mutant(
        "a lost worker is an error",
        "data/loader.py",
        "except RuntimeError as error:",
        "except ZeroDivisionError as error:",
        f"{LOADING}test_killed_worker_raises_and_keeps_the_checkpoint",
    ),
    Mutant(
        "no worker is left behind",
        "data/loader.py",
        "paths._shutdown_workers()",
        "_start_worker.kept = paths",
        f"{LOADING}test_no_worker_survives_the_main_process",
    ),
    Mutant(
        "an output that cannot be written, before the work",
        "pipeline/paths.py",
        "        check_writable(out)",
        "        pass",
        f"{UNWRITABLE}test_read_only_folder[predict]",
    ),
    Mutant(
        "a folder that cannot be written, before the work",
        "pipeline/paths.py",
        "make_folder(path)",
        "path.mkdir(parents=True, exist_ok=True)",
        f"{UNWRITABLE}test_read_only_folder[reproduce]",
    ),
]
