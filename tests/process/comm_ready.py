"""Imported last by the process that worlds are forked from."""

from tests.forking import prepare_to_fork

prepare_to_fork()
