"""Trace readers: what they accept, to the nanosecond, and what they say about the rest."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcupy.simulate import trace as trace_module
from kvcupy.simulate.trace import Request, Trace, read_trace

SHARED = Path(__file__).parents[2] / "shared" / "traces"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
PLAIN = "arrival_s,prompt_tokens,output_tokens"


@pytest.fixture
def file(tmp_path):
    def write(content, name="trace.csv"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


TIMES = [
    "2023-11-16 18:15:46.0003500",
    "2023-11-16 18:15:46.0014750",
    "2023-11-16 18:15:46.0091200",
    "2023-11-16 18:15:47.0000100",
]


def azure(times=TIMES, end="\n"):
    return end.join([AZURE, *(f"{time},{374 + row},{44 + row}" for row, time in enumerate(times)), ""])


@pytest.mark.parametrize(
    "content",
    [
        azure(),
        azure(end="\r\n"),
        azure([f'"{time}"' for time in TIMES]),
        b"\xef\xbb\xbf" + azure().encode(),
        azure() + "\n\r\n  \n",
        azure().rstrip("\n"),
        azure([f"{time}+00:00" for time in TIMES]),
        azure([time.replace(" ", "T") + "Z" for time in TIMES]),
        azure([time.replace("18:15", "20:45") + "+02:30" for time in TIMES]),
        azure([time.replace("18:15", "16:15") + "-02:00" for time in TIMES]),
        azure().replace(AZURE, '"TimeStamp", contexttokens ,GENERATEDTOKENS'),
    ],
    ids=["lf", "crlf", "quoted", "bom", "blank", "no-newline", "+00:00", "Z", "+02:30", "-02:00", "header"],
)
def test_bug_B35_azure_times_keep_seven_digits(file, content):
    trace = read_trace(file(content))
    assert trace.arrival_s.tolist() == [0.0, 0.001125, 0.008770, 0.999660]
    assert trace.prompt_tokens.tolist() == [374, 375, 376, 377]
    assert trace.output_tokens.tolist() == [44, 45, 46, 47]
    assert trace.skipped == {}
    assert trace.name == "trace.csv"


@pytest.mark.parametrize(
    "time",
    [
        "2023-11-16 18:15",
        "2023-02-30 18:15:46",
        "2023-11-16 25:15:46",
        "2023-11-16 18:15:46.00000000000",
        "0000-11-16 18:15:46",
        "16.11.2023 18:15:46",
        "٢٠٢٣-11-16 18:15:46",
        "",
    ],
)
def test_bug_B35_a_bad_time_is_an_error_with_its_line(file, time):
    content = azure([*TIMES[:3], time])
    with pytest.raises(ValueError, match=r"^trace\.csv:5: TIMESTAMP must be a time such as .*, got '"):
        read_trace(file(content))


def test_azure_days_and_reordered_rows(file):
    content = azure(["2024-03-01 00:00:00", "2024-02-28 23:59:59.9", "2024-02-29 00:00:00.0000001"])
    trace = read_trace(file(content))
    assert trace.arrival_s.tolist() == [0.0, 0.1000001, 86_400.1]
    assert trace.prompt_tokens.tolist() == [375, 376, 374]


def test_bug_B36_zero_tokens_are_skipped_and_counted(file):
    rows = ["0,5,0", "1,0,5", "2,7,8", "3,9,0", "4,1,1"]
    trace = read_trace(file("\n".join([PLAIN, *rows])), limit=10)
    assert list(trace) == [Request(2.0, 7, 8), Request(4.0, 1, 1)]
    assert trace.skipped == {"0 output tokens": 2, "0 prompt tokens": 1}
    seconds = [f"2023-11-16 18:15:4{row[0]},{row[2:]}" for row in rows]
    trace = read_trace(file("\n".join([AZURE, *seconds])), limit=10)
    assert list(trace) == [Request(2.0, 7, 8), Request(4.0, 1, 1)]
    assert trace.skipped == {"0 output tokens": 2, "0 prompt tokens": 1}


def test_bug_B36_only_skipped_rows_are_an_empty_trace(file):
    trace = read_trace(file(f"{PLAIN}\n0,0,0\n1,5,0\n"))
    assert len(trace) == 0
    assert list(trace) == []
    assert trace.skipped == {"0 prompt tokens": 1, "0 output tokens": 1}


def test_limit_counts_requests_that_can_run_and_reads_no_further(file):
    path = file(f"{PLAIN}\n0,1,1\n1,0,1\n2,2,2\nrubbish\n")
    assert list(read_trace(path, limit=2)) == [(0.0, 1, 1), (2.0, 2, 2)]
    with pytest.raises(ValueError, match=r"trace\.csv:5: expected 3 fields"):
        read_trace(path, limit=3)
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        read_trace(path, limit=0)


def test_plain_columns_in_any_order_and_arrival_optional(file):
    assert list(read_trace(file("output_tokens,arrival_s,prompt_tokens\n3,1e-3,2\n"))) == [(0.001, 2, 3)]
    assert list(read_trace(file("prompt_tokens,output_tokens\n2,3\n4,5\n"))) == [(0.0, 2, 3), (0.0, 4, 5)]


def test_unsorted_arrivals_are_sorted_and_ties_keep_their_order(file):
    trace = read_trace(file(f"{PLAIN}\n2,1,1\n1,2,2\n2,3,3\n1,4,4\n"))
    assert list(trace) == [(1.0, 2, 2), (1.0, 4, 4), (2.0, 1, 1), (2.0, 3, 3)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("0,5", r"expected 3 fields \(arrival_s,prompt_tokens,output_tokens\), got 2"),
        ("0,5,6,7", r"expected 3 fields .*, got 4"),
        ("-1,5,6", "arrival_s must be seconds from 0 to 1e.10, got '-1'"),
        ("nan,5,6", "arrival_s must be seconds"),
        ("inf,5,6", "arrival_s must be seconds"),
        ("1e300,5,6", "arrival_s must be seconds"),
        ("1_0,5,6", "arrival_s must be seconds"),
        (",5,6", "arrival_s must be seconds .*, got ''"),
        ("0,5.5,6", "prompt_tokens must be a whole number from 0 to 2147483647, got '5.5'"),
        ("0,5,-6", "output_tokens must be a whole number from 0 to 2147483647, got '-6'"),
        ("0,5,2147483648", "output_tokens must be a whole number"),
        ("0," + "9" * 5000 + ",6", "prompt_tokens must be a whole number"),
        ("0,5_0,6", "prompt_tokens must be a whole number"),
        ("0,\u0665,6", "prompt_tokens must be a whole number"),
        ('0,"5,6', "expected comma-separated values"),
        ("0,5,\0", "expected text, got a NUL byte"),
        ("x" * 70_000, "expected a line of text, got more than 65536 bytes"),
    ],
)
def test_bad_lines_name_file_line_and_what_came(file, row, message):
    with pytest.raises(ValueError, match=rf"^trace\.csv:4: {message}"):
        read_trace(file(f"{PLAIN}\n0,1,1\n\n{row}"))


def test_bytes_that_are_no_text(file):
    with pytest.raises(ValueError, match=r"^trace\.csv:2: expected UTF-8 text, got other bytes$"):
        read_trace(file(PLAIN.encode() + b"\n\xff,1,1\n"))
    with pytest.raises(ValueError, match=r"^trace\.csv:1: expected UTF-8 text, got UTF-16$"):
        read_trace(file(azure().encode("utf-16")))
    with pytest.raises(ValueError, match=r"^trace\.csv:1: "):
        read_trace(file(bytes(range(256)) * 10))


def test_files_that_hold_no_trace(file, tmp_path):
    for empty in ("", "\n\n", "\ufeff"):
        with pytest.raises(ValueError, match=r"^trace\.csv: expected a trace, got an empty file$"):
            read_trace(file(empty))
    with pytest.raises(ValueError, match=r"^trace\.csv: expected requests below the header, got none$"):
        read_trace(file(PLAIN))
    with pytest.raises(ValueError, match="expected a trace file, got a directory"):
        read_trace(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "missing.csv")


@pytest.mark.parametrize(
    "header",
    ["a,b,c", f"{PLAIN},model", "prompt_tokens,prompt_tokens,output_tokens", "arrival_s,prompt_tokens"],
)
def test_an_unknown_header_lists_the_accepted_columns(file, header):
    with pytest.raises(ValueError) as error:
        read_trace(file(header + "\n1,2,3\n"))
    assert str(error.value) == (
        "trace.csv:1: expected a header of columns TIMESTAMP,ContextTokens,GeneratedTokens; "
        f"prompt_tokens,output_tokens,[arrival_s]; got {header!r}"
    )


def test_a_format_is_one_function_and_one_line(file, monkeypatch):
    def in_milliseconds(row):
        return int(row[0]), int(row[1]), int(row[1])

    form = trace_module.Format(("ms", "tokens"), in_milliseconds, ticks_per_s=1000)
    monkeypatch.setattr(trace_module, "FORMATS", (*trace_module.FORMATS, form))
    assert list(read_trace(file("ms,tokens\n250,7\n"))) == [(0.25, 7, 7)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (([-1.0], [1], [1]), "arrival_s"),
        (([np.nan], [1], [1]), "arrival_s"),
        (([0.0], [0], [1]), "prompt_tokens must be from 1 to 2147483647, got 0 to 0"),
        (([0.0], [1], [2**31]), "output_tokens must be from 1 to 2147483647"),
        (([0.0], [1.5], [1]), "prompt_tokens must be whole numbers"),
        (([0.0], [1], [1, 2]), "output_tokens must be as long as arrival_s"),
    ],
)
def test_trace_checks_its_columns(columns, message):
    with pytest.raises(ValueError, match=message):
        Trace("bad", *map(np.array, columns))


def test_trace_columns_are_read_only():
    trace = Trace.of([(0.0, 1, 2)])
    with pytest.raises(ValueError, match="read-only"):
        trace.prompt_tokens[0] = 5


def test_shared_azure_trace():
    path = SHARED / "azure_llm_2023_conv.csv"
    if not path.exists():
        pytest.skip("needs ../shared/traces")
    trace = read_trace(path)
    assert len(trace) == 19_366
    assert trace.output_tokens.sum() == 4_088_665
    assert trace.prompt_tokens.mean() == pytest.approx(1155, abs=1)


FIELD = st.sampled_from(
    ["0", "1", "12", "-1", "1.5", "nan", "", '"', '"3"', "é", "\0", "2023-11-16 18:15:46.1", "9" * 30, " 4 "]
)
ROW = st.lists(FIELD, max_size=5).map(",".join)
NEARLY = st.tuples(
    st.sampled_from([AZURE, PLAIN, "prompt_tokens,output_tokens", "\ufeff" + AZURE]),
    st.lists(ROW, max_size=5),
    st.sampled_from(["\n", "\r\n", "\r"]),
).map(lambda parts: parts[2].join([parts[0], *parts[1]]).encode())


@given(content=st.binary(max_size=200) | NEARLY)
def test_any_bytes_are_a_trace_or_a_value_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.csv"
    path.write_bytes(content)
    try:
        trace = read_trace(path)
    except ValueError as error:
        assert str(error).startswith("any.csv")
    else:
        assert np.all(np.diff(trace.arrival_s) >= 0)
        assert np.all(trace.prompt_tokens >= 1)
        assert np.all(trace.output_tokens >= 1)
