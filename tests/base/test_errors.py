"""What users are told: log records."""

import logging

from prunex_mpi.base.errors import log, set_up_logging


def test_records_name_the_rank_and_others_say_only_warnings(capsys):
    set_up_logging(0, 4)
    set_up_logging(0, 4)
    log.info("started")
    set_up_logging(3, 4)
    log.info("not shown")
    log.warning("trouble")
    assert capsys.readouterr().err == "[0/4] started\n[3/4] trouble\n"
    assert not log.propagate


def test_a_record_is_one_line_whatever_names_are_in_it(capsys):
    set_up_logging(0, 4)
    log.warning("left out: %s", "train/\x1b]0;title\x07\n[1/4] all is well")
    said = "[0/4] left out: train/\\x1b]0;title\\x07\\n[1/4] all is well\n"
    assert capsys.readouterr().err == said


def test_logger_is_the_packages():
    assert log is logging.getLogger("prunex_mpi")
