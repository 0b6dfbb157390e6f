"""`python -m research compose`: questions composed of tasks and subjects, each with a follow-up.

Questions that a model writes (`distill --ask`) have little variety; people ask for letters, code, sums,
summaries and arguments, and then for changes to the answer. Every question is a random task with gaps, from
each kind of task in turn, and the gaps are filled at random; a filling may have gaps itself. The file is one
of seeds for `medusa distill --prompts`.

Example: "Write a {form} about {subject}." -> "Write a limerick about beekeeping."
"""

import dataclasses
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from medusa_jax.commands.flags import CommandLine, at_least, flag
from medusa_jax.console import inform
from medusa_jax.whole_files import write_text

EXAMPLES = """examples:
  python -m research compose --n 8192 --out work/smollm2/questions.jsonl
"""

TASKS: dict[str, Sequence[str]] = {
    "writing": (
        "Write a {form} about {subject}.",
        "Write a {tone} {form} for {reader} about {subject}.",
        "Draft a {tone} email to {person} asking for help with {subject}.",
        "Describe {place} at {time} in a way that a reader can smell and hear it.",
        "Write the opening paragraph of a story in which {person} finds {thing} in {place}.",
        "Give me five headlines for an article about {subject}, each under ten words.",
        "Rewrite this so that it sounds {tone}: I saw {thing} near {place} and told {person} about it.",
        "Write a product description of {thing} for {reader}.",
    ),
    "roleplay": (
        "Pretend you are {person} and tell me what you think about {subject}.",
        "You are a tour guide in {place}. Welcome a group of {readers} and tell them about it.",
        "Act as a doctor: I have had a headache since I started with {subject}. What should I do?",
        "Imagine you are {thing} that can speak. Introduce yourself to {person}.",
        "Play an interviewer and ask {person} six questions about {subject}.",
        "You are a strict teacher of {field}. Explain to a lazy pupil why {concept} matters.",
    ),
    "reasoning": (
        "{person} says that {subject} is a waste of time. List arguments for and against, then decide.",
        "If {name} is taller than {other} and {other} is taller than {third}, who is the shortest? Explain.",
        "All {plural} are useful. Some useful things are expensive. Are some {plural} expensive? Reason "
        "step by step.",
        "{name} goes to {place} every {a} days and {other} every {b} days. They met today. When do they "
        "meet again?",
        "What is the odd one out: {plural}, {plural2}, rivers, {plural3}? Say why.",
        "What would happen if people gave up {subject} for a year? Think about causes and effects.",
        "I left {thing} in {place} and it was gone in the morning. Give three possible explanations and "
        "rank them.",
    ),
    "math": (
        "{name} has {a} {plural} and buys {b} boxes with {c} {plural} each. How many are there now?",
        "A shop sells {plural} at ${c} each. {name} pays with ${big} for {a}. How much change is due?",
        "What is {big} divided by {a}, and what is the remainder? Show the steps.",
        "A train covers {big} km in {a} hours. How far does it go in {b} hours at the same speed?",
        "Solve for x: {a}x + {b} = {big}.",
        "{name} reads {a} pages on Monday, twice as many on Tuesday and {c} on Wednesday. How many in all?",
        "A rectangle is {a} cm wide and {b} cm long. What are its area and its perimeter?",
        "Find the average of {a}, {b}, {c} and {big}.",
        "The price of {thing} was ${big} and falls by {a} percent. What is the new price?",
    ),
    "coding": (
        "Write a {language} function that {job}.",
        "Write a {language} function that {job}, with comments and an example of its use.",
        "Explain what {code_concept} is in {language}, with a short example.",
        "How do I read a file with {plural} line by line in {language} and count them?",
        "Write unit tests for a {language} function that {job}.",
        "What is the difference between {code_concept} and {code_concept2}? When would you use each?",
        "Create a small web page in HTML that shows a list of {plural} and a button.",
        "Write an SQL query that finds the five most expensive {plural} in a table called items.",
    ),
    "extraction": (
        "Extract the names and the places from this text as JSON: {name} left {place} with {other} and "
        "{third}. They took {thing} along, which {person} had sold them for ${a}.",
        "Read the note and answer with a table of item and price: {plural} ${a}, {plural2} ${b}, "
        "{plural3} ${c}. Which one costs most?",
        "Summarise in one sentence: {name} had always been interested in {subject}. When {person} offered "
        "a course in {place}, {other} advised against it, but after {a} weeks everybody was impressed.",
        "List all the numbers in this text and add them up: In {place} there were {a} {plural} and {b} "
        "{plural2}, but only {c} {plural3}.",
        "Is this review positive or negative? The {plural} were fine, but {person} was rude and we waited "
        "{a} minutes. Give a reason.",
        "Find the main idea of this text in a few words: People who spend time on {subject} say that it "
        "taught them patience. Experts in {field} agree.",
    ),
    "stem": (
        "Explain {concept} to {reader}.",
        "What is {concept} and why does it matter in {field}?",
        "Describe an experiment that shows {concept}. What do you need and what do you see?",
        "What are the differences between {concept} and {concept2}?",
        "Name three open questions in {field} and say why they are hard.",
        "How does {machine} work? Explain step by step.",
        "What are the benefits and the risks of {machine} for the environment?",
    ),
    "humanities": (
        "How did {event} change the way people lived?",
        "Compare {event} with {event2}: causes, course and consequences.",
        "Write an outline of a lesson about {event} for {readers}.",
        "What would a philosopher say about {subject}?",
        "Explain the economic idea of {economic} with an example about {plural}.",
        "Should schools teach {subject}? Give both sides.",
        "Which books would you recommend to {reader} who wants to understand {event}? Why?",
    ),
    "advice": (
        "What are some tips for starting with {subject}?",
        "Make a plan for {a} days in {place} for {readers}.",
        "I want to give {person} {thing} as a present. What should I think of?",
        "How can I talk to {person} about {subject} without starting an argument?",
        "Give me a recipe with {food} and {food2}, with quantities and steps.",
        "What should {readers} know before they buy {thing}?",
        "How do I take care of {plural}? List the most important points.",
    ),
    "questions": (
        "What is {place} known for?",
        "Why do people like {subject}?",
        "Is it better to learn {field} or {field2} first?",
        "What is the history of {subject}?",
        "Who needs {machine}, and what does one cost?",
        "Translate into French and explain the grammar: {name} buys {plural} for {person}.",
        "What does the word \"{word}\" mean? Use it in three sentences.",
    ),
    "translation": (
        "Translate German to English: {german}",
        "Translate German to English: {german} {german2}",
        "Translate into {tongue}: {sentence}",
        "What does this mean in English? {german}",
    ),
    "summary": (
        "Summarize: {sentence} {sentence2} {sentence3} {sentence4} {sentence5} {sentence6}",
        "Summarize this report in two sentences: {sentence} {sentence2} {sentence3} {sentence4} {sentence5}",
        "Write a headline and three bullet points for this text: {sentence} {sentence2} {sentence3} {sentence4}",
    ),
    "facts": (
        "What is the capital of {country}?",
        "Who invented {invention}?",
        "Who wrote {work}?",
        "When did {event} begin?",
        "Where is {country} and what language do people speak there?",
        "How many people live in {country}?",
        "What is {concept} called in everyday language?",
        "Which is larger, {country} or {country2}?",
    ),
    "passages": (
        "{sentence} {sentence2} {sentence3} {sentence4} {sentence5}\n\nUse the text above to answer: what "
        "happened in {place}, and why does it matter?",
        "Text: {sentence} {sentence2} {sentence3}\nQuestion: who is mentioned, and what did they do?\nAnswer:",
        "{sentence} {sentence2} {sentence3} {sentence4}\n\nWhat does the text say about {subject}? If it says "
        "nothing, say what is known about it.",
        "Here are notes of a meeting. {sentence} {sentence2} {sentence3} Which decisions are still open?",
    ),
    "word problems": (
        "{name} earns ${big} a week and spends ${c} a day on food. How much is left after {a} weeks?",
        "There are {b} {plural} in each of {a} boxes. {name} gives away {c} of them. How many remain?",
        "{name} is {a} years younger than {other}, who is {big} months old. How old is {name}?",
        "A ticket costs ${b} and children pay half. What do {a} adults and {a} children pay together?",
        "{name} has {a} times as many {plural} as {other}. Together they have {big}. How many does {other} have?",
        "{name} reads {b} pages an hour, and {other} reads {c} percent more. How many pages does {other} read in "
        "{a} hours?",
    ),
}  # fmt: skip

# Second turns, as people ask them of an answer.
FOLLOW_UPS = (
    "Now explain it again to {reader}.",
    "Rewrite your answer so that it sounds {tone}.",
    "Make it shorter.",
    "Summarise your answer in one sentence.",
    "Give an example with {plural}.",
    "Can you turn that into a list of steps?",
    "Write the same as a {form}.",
    "Are you sure? Check your answer step by step.",
    "What would change if {name} did it in {place}?",
    "Why is that so?",
    "What are the weak points of your answer?",
    "Translate your answer into {tongue}.",
    "Put the main points into a table.",
    "Write your answer again and start every sentence with a different letter.",
    "How does this relate to {concept}?",
    "Give two more examples.",
    "What should I read to learn more about it?",
    "Now do the same for {subject}.",
    "Return your answer as JSON.",
    "What if the first number were {a} times as large?",
    "Which of these points is the most important one, and why?",
    "Add a title and a closing sentence.",
    "What would {person} say about it?",
    "Can it be done in a faster or simpler way?",
)

WORDS: dict[str, str] = {
    "form": "poem|short story|limerick|speech|blog post|letter|song|review|fable|dialogue|diary entry|haiku",
    "tone": "friendly|formal|funny|persuasive|sad|short|enthusiastic|polite|poetic|ironic|clear|angry",
    "subject": "beekeeping|long-distance running|online meetings|night trains|learning the violin|city "
    "gardens|chess|remote work|growing tomatoes|old photographs|public libraries|cooking for one|electric "
    "cars|sleep|moving to another country|saving money|job interviews|social media|wild birds|volunteer "
    "work|climate change|board games|meditation|school uniforms|keeping a diary|hiking alone|modern art|"
    "space travel|street food|cycling to work|healthy habits|video games|fashion|recycling|friendship|"
    "public speaking|time management|swimming in cold water|local history|artificial intelligence",
    "reader": "a child of ten|a busy manager|a beginner|my grandmother|a student in the first year|somebody "
    "without any background|a journalist|a new colleague|a teenager|an engineer",
    "readers": "young parents|school classes|retired people|students|families with children|tourists|"
    "beginners|office workers|teenagers|scientists",
    "person": "my landlord|a retired sailor|the mayor of a small town|my sister|a famous chef|Ada Lovelace|a "
    "young detective|my boss|an old friend|Albert Einstein|the owner of a bakery|a nervous student|Queen "
    "Cleopatra|a space engineer|my neighbour|a professional football player|Sherlock Holmes|a librarian",
    "place": "a lighthouse|Kyoto|an abandoned factory|the Alps|a crowded market|Lisbon|a small island|the "
    "Sahara|a night club|New Orleans|a railway station|Iceland|a school kitchen|Nairobi|the moon|Buenos "
    "Aires|a botanical garden|Hawaii|an old castle|Toronto",
    "time": "dawn|noon|midnight|the end of summer|the first day of snow|closing time|sunset",
    "thing": "a silver watch|an old map|a used bicycle|a telescope|a letter without a sender|a coffee "
    "machine|a wooden boat|a violin|a pair of red boots|a smart phone|a sewing machine|a camera|a robot "
    "that cleans windows|a box of seeds|a leather bag|a folding table",
    "plural": "apples|books|bicycles|candles|notebooks|lamps|pencils|chairs|plants|tickets|shirts|bottles",
    "plural2": "oranges|magazines|scooters|mugs|folders|clocks|erasers|tables|flowers|stamps|hats|glasses",
    "plural3": "cats|spoons|kites|doors|cameras|violins|umbrellas|socks|cakes|ladders|windows|rings",
    "name": "Maria|Tom|Aisha|Pedro|Lena|Kofi|Yuki|Sam|Ravi|Clara",
    "other": "Ben|Olga|Ahmed|Julia|Chen|Nora|David|Fatima|Hugo|Ines",
    "third": "Anna|Marco|Leila|Victor|Emma|Jonas|Priya|Oscar|Zoe|Karl",
    "field": "physics|biology|chemistry|economics|computer science|geology|medicine|statistics|astronomy|"
    "electrical engineering",
    "field2": "history|psychology|mathematics|philosophy|law|linguistics|music|geography",
    "concept": "photosynthesis|gravity|the greenhouse effect|natural selection|entropy|electric current|"
    "the water cycle|supply and demand|radioactive decay|the immune system|plate tectonics|osmosis|friction|"
    "the Doppler effect|chemical equilibrium|machine learning|standard deviation|magnetism|DNA replication|"
    "black holes|acids and bases|the scientific method|vaccination|superconductivity|probability",
    "concept2": "momentum|respiration|heat|inheritance|voltage|evaporation|inflation|nuclear fusion|"
    "infection|erosion|diffusion|acceleration|correlation|energy|light",
    "machine": "a refrigerator|a wind turbine|a combustion engine|a microscope|a solar panel|a 3D printer|"
    "a nuclear reactor|a washing machine|a computer processor|an aeroplane wing|a battery|a satellite",
    "event": "the Industrial Revolution|the French Revolution|the fall of Rome|the invention of printing|"
    "the Great Depression|the Renaissance|the Cold War|the Black Death|the moon landing|the Silk Road",
    "event2": "the American Civil War|the First World War|the end of apartheid|the Enlightenment|the space "
    "race|the oil crisis of 1973|the Reformation|the rise of the internet",
    "economic": "opportunity cost|inflation|a monopoly|comparative advantage|elasticity|a public good|"
    "diminishing returns|interest rates|GDP|a market failure",
    "language": "Python|JavaScript|C++|Java|Go|Rust|Python|Python",
    "job": "reverses a string|checks whether a number is prime|counts the words in a text|sorts a list of "
    "numbers without the library|returns the n-th Fibonacci number|merges two sorted lists|removes duplicates "
    "from a list|finds the longest common prefix of some strings|converts Celsius to Fahrenheit|validates an "
    "email address|counts the vowels in a sentence|computes the factorial of a number|finds the two largest "
    "values in an array|checks whether brackets are balanced|flattens a nested list|searches a sorted array|"
    "computes the average of a column in a CSV file|builds a binary tree|rounds prices to two digits|swaps the "
    "keys and values of a dictionary",
    "code_concept": "a hash table|recursion|a pointer|an iterator|inheritance|a closure|a linked list|"
    "exception handling|a decorator|a queue",
    "code_concept2": "an array|a loop|a reference|a generator|composition|a class|a stack|a set|a callback",
    "food": "chickpeas|chicken|mushrooms|rice|eggs|potatoes|salmon|tofu|pasta|lentils",
    "food2": "lemon|spinach|garlic|coconut milk|tomatoes|cheese|ginger|carrots|basil|yoghurt",
    "word": "resilient|ambiguous|frugal|meticulous|nostalgia|benevolent|obsolete|candid|inevitable|tedious|"
    "serendipity|pragmatic",
    "tongue": "French|Spanish|German|Italian|Portuguese|Dutch",
    "country": "Portugal|Kenya|Peru|Vietnam|Norway|Egypt|Canada|New Zealand|Poland|Morocco|Chile|Japan|Greece|"
    "Indonesia|Ireland|Turkey",
    "country2": "Spain|Nigeria|Bolivia|Thailand|Sweden|Algeria|Mexico|Australia|Hungary|Argentina|South Korea",
    "invention": "the telephone|the light bulb|the printing press|the steam engine|dynamite|the radio|the "
    "World Wide Web|penicillin|the aeroplane|the telescope|the sewing machine",
    "work": "Hamlet|Don Quixote|Frankenstein|War and Peace|The Odyssey|Moby-Dick|Jane Eyre|Faust|Dracula|The "
    "Origin of Species",
    "day": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|last night|this morning",
    "sentence": "On {day} {person} opened a new centre for {subject} in {place}.|The number of {plural} sold in "
    "{place} rose by {a} percent to {big}, officials said on {day}.|{name}, who has worked in {field} for {b} "
    "years, called the plan a mistake.|Police in {place} are looking for {thing} that was taken on {day}.|A "
    "study with {big} {readers} found that {subject} can improve sleep and mood.|\"We did not expect this,\" "
    "said {other}, who lost {thing} in the accident.|The project costs {c} million dollars and will take {a} "
    "years.|Critics say that {machine} is too expensive for {country}.|Interest in {subject} goes back to "
    "{event}.|{third} and {name} met in {place} and founded a company that repairs {plural}.|The council will "
    "decide about {subject} on {day}.|Scientists in {country} say that {concept} explains the result.",
    "german": "Der Zug nach {city} hat heute {a} Minuten Verspätung.|{name} hat am {tag} {b} Karten für das "
    "Konzert gekauft.|Die Stadt {city} will in den nächsten {a} Jahren mehr Bäume pflanzen.|Viele Menschen in "
    "{city} fahren lieber mit dem Fahrrad zur Arbeit.|{other} sagte, dass die Preise im letzten Jahr um {a} "
    "Prozent gestiegen sind.|Die Polizei sucht einen Mann, der am {tag} in {city} eine Uhr gestohlen hat.|Nach "
    "dem Regen war die Straße zwischen {city} und dem Fluss gesperrt.|Die neue Brücke kostet {c} Millionen Euro "
    "und wird im Sommer eröffnet.|Wer zu spät kommt, muss bis {tag} warten.|{name} und {other} haben sich auf "
    "einer Reise nach {city} kennengelernt.|Der Minister erklärte am {tag}, dass die Schule geschlossen bleibt.|"
    "Im Winter sind die Wohnungen in {city} oft zu kalt.",
    "city": "Hamburg|München|Wien|Zürich|Leipzig|Köln|Dresden|Bremen|Graz|Berlin",
    "tag": "Montag|Dienstag|Mittwoch|Donnerstag|Freitag|Samstag|Sonntag",
}  # fmt: skip
# Gaps for further sentences from the same list.
WORDS |= {f"sentence{i}": WORDS["sentence"] for i in range(2, 7)}
WORDS["german2"] = WORDS["german"]

_CHOICES = {gap: words.split("|") for gap, words in WORDS.items()}
_NUMBERS = {"a": (2, 12), "b": (3, 20), "c": (2, 30), "big": (100, 900)}


def _filled(text: str, rng: random.Random) -> str:
    def fill(gap: re.Match[str]) -> str:
        name = gap[1]
        if name in _NUMBERS:
            return str(rng.randint(*_NUMBERS[name]))
        return _filled(rng.choice(_CHOICES[name]), rng)

    return re.sub(r"\{(\w+)\}", fill, text)


def compose(number: int) -> tuple[str, str]:
    """The question of this number and its follow-up; deterministic."""
    kinds = list(TASKS)
    rng = random.Random(number)
    task = rng.choice(TASKS[kinds[number % len(kinds)]])
    texts = [_filled(task, rng), _filled(rng.choice(FOLLOW_UPS), rng)]
    question, follow_up = (text[0].upper() + text[1:] for text in texts)
    return question, follow_up


def composed(n: int, first: int = 0) -> list[tuple[str, str]]:
    """`n` different questions, starting with question `first`, each with its follow-up."""
    origins: dict[str, str] = {}
    number = first
    while len(origins) < n:
        question, follow_up = compose(number)
        origins.setdefault(question, follow_up)
        number += 1
    return list(origins.items())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """Write questions, each with a follow-up, as seeds of a distillation."""

    n: int = flag("number of questions", 8192, type=at_least(1))
    first: int = flag("number of the first one", 0, type=at_least(0))
    out: str = flag("file to write", "work/smollm2/questions.jsonl")


def run(flags: Flags) -> int:
    """Write one line per question."""
    out = Path(flags.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"turns": turns}) for turns in composed(flags.n, flags.first)]
    write_text(out, "".join(line + "\n" for line in lines))
    inform(f"wrote {flags.n} questions to {out}")
    return 0


main = CommandLine("python -m research compose", Flags, run, EXAMPLES)
