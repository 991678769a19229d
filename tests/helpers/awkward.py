"""Strings that tokenizers get wrong: more than 300, always the same ones."""

import random

CODE = [
    "def f(x):\n    return x**2\n",
    "\tif (a != b) {\r\n\t\treturn -1;\r\n\t}",
    "x = y**2\n\treturn",
    "for(;;){}//\\\\\n",
    "SELECT * FROM t WHERE a='b''c' -- ok",
    '<div class="a">&nbsp;</div><!-- x -->',
    "a->b::c<T, U>&&(d|=~e);",
    "$HOME/.cache/*.{json,yml}",
    "\\begin{align} \\frac{1}{2} \\end{align}",
    '{"a": [1, 2.5e-10, null], "b": "\\u00e9"}',
    "r'^\\d{3}-\\d{4}$'",
    "0x7fff_ffff + 0b1010 - 1e-9",
    "https://example.org/a?b=c&d=%20#e",
    "user.name+tag@example.co.uk",
]
NUMBERS = ["12345", "3.14159", "In 2024 we had 1,234.50", "1" * 40, "١٢٣٤", "½ ² ³ Ⅷ ①", "-0", "1_000", "1e999"]
WORDS = [
    "don't", "we'll", "I'VE", "it’s", "''s", "foo_bar", "fooBarBaz", "ALLCAPS", "a" * 64, "Hello world",
    " Hello", "Hello ", "naïve café", "Straße ẞ", "Ðe ŋ ſ", "İstanbul ıI", "ﬁne ﬂow", "x" * 300,
    "antidisestablishmentarianism",
]  # fmt: skip
EMOJI = [
    "🙂", "🫠🔥", "👩‍👩‍👧‍👦", "👍🏽👍🏿", "🏳️‍🌈", "🇫🇷🇩🇪🇯", "1️⃣#️⃣", "❤️ ❤", "🧑🏻‍🚀!", "☕︎☕️", "a🙂b",
    "🙂" * 20,
]  # fmt: skip
SCRIPTS = [
    "你好，世界！", "中文English混排123", "繁體中文「引號」", "日本語のテキストです。", "ｶﾀｶﾅ ﾊﾝｶｸ",
    "한국어 문장입니다", "ㅎㅏㄴ", "مرحبا بالعالم", "السَّلَامُ عَلَيْكُمْ", "שלום עולם", "हिन्दी में लिखा",
    "ภาษาไทยไม่มีช่องว่าง", "தமிழ்", "Привет, мир!", "Ελληνικά", "ქართული", "አማርኛ", "Tiếng Việt",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝒮𝒸𝓇𝒾𝓅𝓉", "𠮷野家", "𓀀𓂀", "ꓘꓳ", "᚛ᚑᚌᚐᚋ᚜",
]  # fmt: skip
MARKS = [
    "e\u0301 é", "a\u0300\u0301\u0302\u0303", "Z̷̧̢͠a̵͜l̶g̸o̷", "n\u0303o", "\u0301alone", "가\u11a8", "ﷺ",
    "\u1e9b\u0323", "Å Å Å", "\u0958 क़", "ﬀ", "a\u200db", "a\u200cb", "\u2066isolated\u2069",
    "\u202eright to left\u202c",
]  # fmt: skip
SPACES = [
    "", " ", "  ", "   ", " " * 17, " " * 200, "\n", "\n\n\n", "\r\n\r\n", "\r", "\t", "\t\t  \t", " \n \n ",
    "a  b", "a   b    c", "\u00a0", "a\u00a0b", "\u3000全角", "\u2003em\u2009thin\u200bzero",
    "\u2028line\u2029paragraph", "\v\f\x85", "trailing   ", "   leading", "\n\n  mixed\t \n", "end\n",
]  # fmt: skip
CONTROLS = [
    "\x00", "a\x00b", "\x01\x02\x1b[31m", "\x7f", "\ufeffBOM", "\ufffd", "\ufffe\uffff", "\ufdd0", "\U0010ffff",
    "\ue000private", "\x80\x9f", "▁", "a▁b", "▁▁▁", "Ġ", "Ċ", "<0x0A>", "<0xE2><0x82>", "##ing", "</w>",
    "[UNK]",
]  # fmt: skip
SPECIALS = [
    "<s>", "</s>", "<s>abc", "abc</s>", "a<s>b</s>c", " <s> ", "<s></s><s>", "<s", "s>", "<<s>>",
    "<|im_start|>user\nHi<|im_end|>", "A<|im_end|>B", "<|im_end|", "<|im_ end|>", "<|IM_END|>", "<pad><pad>",
    "<|im_start|><|im_start|>", "\n<|im_end|>\n", " <|im_end|>x", "<tool>", "a<tool>b</tool>", "<|endoftext|>",
]  # fmt: skip

FRAGMENTS = [*CODE, *NUMBERS, *WORDS, *EMOJI, *SCRIPTS, *MARKS, *SPACES, *CONTROLS, *SPECIALS]


def _mixed(count: int) -> list[str]:
    rng = random.Random(20)
    return ["".join(rng.choices(FRAGMENTS, k=rng.randint(2, 6))) for _ in range(count)]


AWKWARD = list(dict.fromkeys([*FRAGMENTS, *_mixed(250)]))
