"""Texts: numbers and ids as a table shows them."""

import math

from replaylake.serve.pages.texts import short_number, shorten_id


def test_a_short_number_has_four_digits_and_no_exponent():
    shown = {
        None: "unknown",
        4137: "4,137",
        12_345_678: "12,345,678",
        294.742: "294.7",
        999.96: "1,000",
        1234.56: "1,235",
        -98765.4: "-98,765",
        0.000964196: "0.0009642",
        -0.0: "0",
        1e300: "1e+300",
        math.inf: "inf",
    }
    assert {value: short_number(value) for value in shown} == shown


def test_an_id_keeps_its_ends():
    known = "3b98dedabaa5092c/1050046105"
    assert shorten_id(known) == known
    served = "served/d-F-5NKYFMst2EWBqlIEO---------------0NqljQaJYPJkoEPZb-uq5Jok"
    assert shorten_id(served) == "served/d-F-5NKYFMst2EWB\u2026PZb-uq5Jok"
    assert len(shorten_id("x" * 35)) == 34
