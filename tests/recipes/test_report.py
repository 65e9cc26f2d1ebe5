import re
from html.parser import HTMLParser

from tfgpu.recipes.facts import where
from tfgpu.recipes.report import Report, best_epoch, render

ROWS = [
    {
        "accuracy": 0.5,
        "loss": 1.0,
        "val_accuracy": 0.6,
        "val_loss": 0.9,
        "learning_rate": 1e-3,
        "step_time_s": 0.01,
    },
    {
        "accuracy": 0.9,
        "loss": 0.4,
        "val_accuracy": 0.95,
        "val_loss": 0.3,
        "learning_rate": 5e-4,
        "step_time_s": 0.009,
    },
    {
        "accuracy": 0.95,
        "loss": 0.3,
        "val_accuracy": 0.94,
        "val_loss": 0.2,
        "learning_rate": 1e-5,
        "step_time_s": 0.009,
    },
]


class Tags(HTMLParser):
    """Collects the text and every attribute, and checks that tags close in order."""

    VOID = {"meta", "br", "img", "link", "hr", "input", "path", "use", "rect"}

    def __init__(self, page: str):
        super().__init__()
        self.open, self.text, self.attributes = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def page(**changes) -> str:
    settings = {"title": "cnn on digits", "subtitle": "today", "tested": {"accuracy": 0.9917}, "rows": ROWS} | changes
    return render(Report(**settings))


def test_the_page_is_whole_and_shows_the_numbers():
    html = page(
        cards=[("parameters", "1,234", "")],
        facts={"Hardware": {"strategy": "mirrored", "replicas": 4}},
        settings={"epochs": "3"},
        advice=["Use 96 or 104."],
        confusion=[[3, 0], [1, 2]],
        class_names=["cat", "dog"],
    )
    tags = Tags(html)
    assert tags.open == []
    text = " ".join(tags.text)
    for expected in (
        "99.2%",
        "1,234",
        "mirrored",
        "Use 96 or 104.",
        "dog taken for cat: 1",
        "66.7%",
        "best: epoch 2",
    ):
        assert expected in text, expected


def test_nothing_is_loaded_from_other_hosts():
    tags = Tags(page())
    loaded = [value for name, value in tags.attributes if name in ("src", "href", "xlink:href", "srcset")]
    assert all(value.startswith("#") for value in loaded)
    assert "@import" not in page() and not re.search(r"url\((?!#)", page())


def test_four_drawings_whose_colors_follow_the_page():
    html = page()
    assert html.count("<svg") == 4
    assert "var(--first)" in html and "var(--second)" in html
    assert not re.search(r"#0(10203|40506|70809|a0b0c)", html)
    identifiers = re.findall(r'<clipPath id="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))


def test_the_same_run_gives_the_same_page():
    assert page() == page()


def test_texts_are_escaped():
    assert "<script>" not in page(title="<script>alert(1)</script>", settings={"data": "<script>"}, advice=["<script>"])


def test_a_run_of_one_epoch_without_validation():
    assert page(rows=[{"loss": 1.0}]).count("<svg") == 1
    text = "".join(Tags(page(rows=[{"accuracy": 0.0, "loss": 1.0}])).text)
    assert "0.98" not in text and "−" not in text  # neither parts of an epoch, nor below 0 %
    ticks = {each.strip() for each in Tags(page(rows=[{"loss": 300.0}])).text}
    assert "1" in ticks and not {"0.6", "0.8", "1.0", "1.2", "1.4"} & ticks


def test_best_epoch():
    assert best_epoch(ROWS) == 2
    assert best_epoch([{"val_loss": 2.0}, {"val_loss": 1.0}, {"val_loss": 1.5}]) == 2
    assert best_epoch([{"loss": 2.0}]) is None


def test_the_best_epoch_of_a_language_model_has_the_lowest_perplexity():
    rows = [
        {"val_accuracy": accuracy, "val_loss": 5.0, "val_perplexity": perplexity, "accuracy": 0.1, "loss": 1.0}
        for accuracy, perplexity in ((0.3, 9.0), (0.2, 8.0))
    ]
    assert best_epoch(rows) == 2
    assert "best: epoch 2" in "".join(Tags(page(rows=rows)).text)


def test_the_layout_of_a_pretrained_model_is_named_beside_its_devices():
    facts = {"strategy": "mirrored", "replicas": 2, "devices": ["CPU:0", "CPU:1"], "device_names": ["a CPU"]}
    assert where(facts) == "mirrored × 2 on CPU:0, CPU:1 (a CPU)"
    assert where(facts | {"pretrained": {"layout": "zero3"}}) == "zero3, mirrored × 2 on CPU:0, CPU:1 (a CPU)"
    assert where(facts | {"pretrained": {"layout": "mirrored"}}) == where(facts)
    facts |= {"replicas": 1, "pretrained": {"layout": "pipeline"}}
    assert where(facts) == "pipeline on CPU:0, CPU:1 (a CPU)"


def test_a_large_confusion_matrix_is_left_out():
    many = [[1 if i == j else 0 for j in range(21)] for i in range(21)]
    assert "predicted" not in page(confusion=many, class_names=[str(i) for i in range(21)])


def test_a_language_models_score_is_its_perplexity():
    assert Report("a", "", {"accuracy": 0.272, "perplexity": 18.55}, rows=[]).score == ("18.55", "test perplexity")
    assert Report("a", "", {"accuracy": 0.272}, rows=[]).score == ("27.2%", "test accuracy")
