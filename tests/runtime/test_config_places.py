"""The line of every key: exact for whatever tomllib accepts."""

from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from ppruntime.config.toml_places import key_lines

_ORDINARY = '''\
top = 1                                  # a comment with [brackets] and = signs

[pp]
size = 4
layers_per_stage = [                     # an array over several lines
  2.5,
  "a # in a text ]",
  { deep = [1, 2], other = "}" },
]
inline = { size = 1, "quoted key" = 2 }
a.b . "c.d" = """
size = 5
\\"""
"""
after = \'\'\'
[not.a.table]
\'\'\'

[moe.dispatch]
type = "torch"

[[list.of]]
name = 'one'
[[list.of]]
name = 2979-05-27 07:32:00
[list.of.below]
x = """"four quotes end here""""
y = 2
'''


def test_every_kind_of_key_has_its_line():
    lines = key_lines(_ORDINARY)
    source = _ORDINARY.splitlines()
    for path, start in {
        ("top",): "top",
        ("pp",): "[pp]",
        ("pp", "size"): "size = 4",
        ("pp", "layers_per_stage"): "layers_per_stage",
        ("pp", "layers_per_stage", 1): '"a #',
        ("pp", "layers_per_stage", 2, "deep"): "{ deep",
        ("pp", "layers_per_stage", 2, "other"): "{ deep",
        ("pp", "inline", "size"): "inline",
        ("pp", "inline", "quoted key"): "inline",
        ("pp", "a", "b", "c.d"): "a.b",
        ("pp", "after"): "after",
        ("moe",): "[moe",
        ("moe", "dispatch", "type"): "type",
        ("list", "of", 0, "name"): "name = 'one'",
        ("list", "of", 1, "name"): "name = 2979",
        ("list", "of", 1, "below", "x"): "x =",
        ("list", "of", 1, "below", "y"): "y = 2",
    }.items():
        assert source[lines[path] - 1].strip().startswith(start), path


def _paths(value, path=()):
    """The path of every table, key and array entry in parsed TOML."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        yield (*path, name)
        if isinstance(inner, dict | list):
            yield from _paths(inner, (*path, name))


def test_every_path_of_a_parsed_text_has_a_line_and_no_other_path_has():
    assert set(key_lines(_ORDINARY)) == set(_paths(tomllib.loads(_ORDINARY)))


_texts = st.text(st.sampled_from("ab=[]{}#,.'\"\\ \n\té"), max_size=8)
_names = st.text(st.sampled_from("abc_-.= #]\"'é"), min_size=1, max_size=5)


def _quoted(text):
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escapes.get(c, c) for c in text) + '"'


def _multiline(text):
    return '"""\n' + text.replace("\\", "\\\\").replace('"', '\\"') + '"""'


_values = st.recursive(
    st.one_of(
        st.integers(-99, 99).map(str),
        st.sampled_from(["true", "1.5e3", "inf", "1979-05-27", "'[# ='"]),
        _texts.map(_quoted),
        _texts.map(_multiline),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda v: "[ # c ]\n" + ",\n".join(v) + "\n]"),
        st.lists(inner, max_size=3).map(
            lambda v: "{" + ", ".join(f"k{i} = {x}" for i, x in enumerate(v)) + "}"
        ),
    ),
    max_leaves=6,
)


@given(st.lists(st.tuples(st.sampled_from(["k", "t"]), _names, _values, _texts), max_size=8))
def test_lines_are_where_the_keys_were_written(entries):
    """Builds a text key by key, so that every line is known; names are made unique by a number."""
    text, table, expected = "", (), {}
    for number, (kind, name, value, comment) in enumerate(entries):
        name = f"{name}{number}"
        line = text.count("\n") + 1
        if kind == "t":
            table = (name,)
            text += f"[ {_quoted(name)} ]  # {comment!r}\n\n"
        else:
            text += f"{_quoted(name)}\t= {value}  # {comment!r}\n"
        expected[table if kind == "t" else (*table, name)] = line
    tomllib.loads(text)
    lines = key_lines(text)
    assert {path: lines[path] for path in expected} == expected
    assert set(lines) == set(_paths(tomllib.loads(text)))
