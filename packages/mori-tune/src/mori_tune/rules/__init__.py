"""Tuned rules: their files, how one is found, how one is saved."""

from mori_tune.rules.book import Book, Decision, agree, agreed_book, book_for, lookup
from mori_tune.rules.files import Rule, Table, read_tables
from mori_tune.rules.format import EP_COMBINE, EP_DISPATCH, GEMM_AR, Format, Query
from mori_tune.rules.saving import Change, changes_between, save_rules

__all__ = [
    "EP_COMBINE",
    "EP_DISPATCH",
    "GEMM_AR",
    "Book",
    "Change",
    "Decision",
    "Format",
    "Query",
    "Rule",
    "Table",
    "agree",
    "agreed_book",
    "book_for",
    "changes_between",
    "lookup",
    "read_tables",
    "save_rules",
]
