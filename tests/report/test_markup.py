"""Elements escape every string that is not markup already."""

from fragdoctor.report.markup import MAX_SHOWN, joined, ours, tag


def test_text_and_attributes_are_escaped_and_made_visible() -> None:
    assert tag("b", "<i>\u202e", title='"&') == '<b title="&#34;&amp;">&lt;i&gt;\\u202e</b>'


def test_markup_of_ours_is_kept_and_children_may_be_nested_or_absent() -> None:
    assert tag("td", [tag("b", "x"), None, ("y", ours("<br>"))]) == "<td><b>x</b>y<br></td>"


def test_true_is_an_attribute_without_a_value_and_none_leaves_it_out() -> None:
    made = tag("input", type="file", multiple=True, hidden=False, aria_label=None, tabindex=0)

    assert made == '<input type="file" multiple tabindex="0">'


def test_long_text_is_cut_and_says_by_how_much() -> None:
    shown = joined("x" * (MAX_SHOWN + 20))

    assert shown == "x" * MAX_SHOWN + " ... (20 more characters)"
