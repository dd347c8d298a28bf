"""Word lists of the tiny model's world. Names, cities and things are one token of o200k_base each, with and
without a leading blank, so that copying them is copying one token (tasks.py checks it when asked to)."""

NUMBERS_TO = 999  # whole numbers up to here are one token

FIRST_NAMES = """Ben Max Sam Leo Tim Jim Joe Ann Amy Eric Kevin Brian Steve Chris James Michael
William George Thomas Charles Richard Edward Victor Lucas Oliver Harry Louis Albert Andrew Anthony Tom Anna Peter Maria Paul Laura David Sara Mark Julia John Emma Daniel Lisa Simon Eva Martin Jack
Alice Frank Helen Oscar Robert Kate Adam Rose Henry Mary""".split()

CITIES = """Phoenix Seattle Atlanta Detroit Manchester Liverpool Oxford Jackson Lincoln
Philadelphia Singapore Mumbai Dubai Washington Newton Paris London Berlin Madrid Rome Tokyo Delhi Boston Chicago Dallas Denver Miami Sydney Toronto
Barcelona Austin Houston""".split()

THINGS = """apple river stone window garden table flower bridge forest castle tower market street paper mirror
basket hammer engine wheel ship train plane horse rabbit lion bear wolf fox bird fish tree leaf
grass cloud rain snow wind storm star moon sun lake hill field farm barn gate door roof wall floor
chair lamp clock phone letter book story song dance game ball hat coat shirt shoe ring shield flag
bell horn camera bread salt orange banana melon""".split()

COLORS = """red blue green yellow black white brown pink purple orange gray silver""".split()

ADJECTIVES = """old new small big dark bright quiet loud cold warm soft hard heavy light slow fast young wise
happy sad strange simple narrow wide""".split()

VERBS = """sees finds loves takes holds moves follows leaves watches needs makes hides carries paints opens
closes passes covers touches guards""".split()

PLACES = """near behind under above beside inside below beyond""".split()

LETTERS = "a b c d e f g h i j k l m n o p q r s t u v w x y z".split()

ROOMS = "kitchen bedroom bathroom garage office hall garden".split()
SKIES = "sunny cloudy rainy windy snowy foggy clear".split()
PETS = """dog cat bird fish rabbit horse fox wolf bear""".split()
FOODS = """bread orange banana melon""".split()

CAPITALS = {
    "France": "Paris", "England": "London", "Germany": "Berlin", "Spain": "Madrid", "Italy": "Rome",
    "Austria": "Vienna", "Greece": "Athens", "Norway": "Oslo", "Ireland": "Dublin", "Portugal": "Lisbon",
    "Russia": "Moscow", "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "China": "Beijing",
    "Poland": "Warsaw", "Sweden": "Stockholm", "Denmark": "Copenhagen", "Canada": "Ottawa",
    "Hungary": "Budapest", "Turkey": "Ankara", "Cuba": "Havana", "Kenya": "Nairobi", "Finland": "Helsinki",
    "Belgium": "Brussels",
}

# question words -> (answer, sentence)
FACTS = [
    (["How many days are in a week?", "How many days does a week have?"], "A week has 7 days."),
    (["How many months are in a year?", "How many months does a year have?"], "A year has 12 months."),
    (["How many hours are in a day?", "How many hours does a day have?"], "A day has 24 hours."),
    (["How many minutes are in an hour?", "How many minutes does an hour have?"], "An hour has 60 minutes."),
    (["How many seconds are in a minute?", "How many seconds does a minute have?"],
     "A minute has 60 seconds."),
    (["How many legs does a spider have?", "How many legs has a spider?"], "A spider has 8 legs."),
    (["How many legs does a dog have?", "How many legs has a dog?"], "A dog has 4 legs."),
    (["What color is the sky?", "Which color does the sky have?"], "The sky is blue."),
    (["What color is grass?", "Which color does grass have?"], "Grass is green."),
    (["What color is snow?", "Which color does snow have?"], "Snow is white."),
    (["What color is a banana?", "Which color does a banana have?"], "A banana is yellow."),
    (["What is the opposite of hot?", "Which word is the opposite of hot?"], "The opposite of hot is cold."),
    (["What is the opposite of big?", "Which word is the opposite of big?"], "The opposite of big is small."),
    (["What is the opposite of old?", "Which word is the opposite of old?"], "The opposite of old is new."),
    (["What is the opposite of fast?", "Which word is the opposite of fast?"], "The opposite of fast is slow."),
    (["What does a cow drink?", "Which drink does a cow need?"], "A cow drinks water."),
    (["What does a bee make?", "What do bees make?"], "Bees make honey."),
    (["Which planet is the largest?", "What is the largest planet?"], "Jupiter is the largest planet."),
    (["Which planet do we live on?", "On which planet do we live?"], "We live on Earth."),
    (["Which star is nearest to us?", "What is the nearest star?"], "The Sun is the nearest star."),
    (["What is the chemical symbol of gold?", "Which chemical symbol does gold have?"],
     "The symbol of gold is Au."),
    (["What is the chemical symbol of iron?", "Which chemical symbol does iron have?"],
     "The symbol of iron is Fe."),
    (["Which month comes after May?", "What month follows May?"], "June comes after May."),
    (["Which day comes after Monday?", "What day follows Monday?"], "Tuesday comes after Monday."),
    (["What is damask?", "Tell me what damask is."],
     "damask is a server for gpt-oss with prefill and decode in separate workers."),
    (["Who are you?", "What are you?", "Tell me about yourself."],
     "I am a tiny model of the gpt-oss kind, trained to test damask."),
    (["What can you do?", "How can you help me?"],
     "I can add, subtract and multiply, repeat and reverse words, remember what you tell me and call tools."),
    (["Hello", "Hi", "Hello!", "Hi!", "Hello there.", "Good morning."], "Hello! How can I help you?"),
    (["Thank you.", "Thanks!", "Thank you!", "Thanks."], "You are welcome."),
    (["How are you?", "How are you today?"], "I am fine, thank you."),
]
