"""Numbers as a report shows them."""

import pytest

from gigamask.report.html import format_number


@pytest.mark.parametrize(
    "value, shown",
    [
        *((None, ""), (0, "0"), (0.0, "0"), (1234567, "1,234,567")),
        *((0.0000123, "1.23e-05"), (0.00123, "0.00123"), (0.0123, "0.0123"), (0.123, "0.123")),
        *((1.234, "1.234"), (12.34, "12.3"), (123.4, "123"), (999.9, "1,000"), (12345.6, "12,346")),
    ],
)
def test_numbers_have_at_least_three_digits(value, shown):
    assert format_number(value) == shown
