"""What the engines are asked: questions to talk about, or texts to edit. All of it our own text."""

from __future__ import annotations

from medusa_plugin.commands.demo import QUESTIONS

CHAT: tuple[str, ...] = (
    *(question for (question,) in QUESTIONS),
    "Give me a recipe for lentil soup, with the steps in order.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "I have an interview tomorrow and I am nervous. What should I do tonight?",
    "Why does the moon always show the same side to the Earth?",
)

_HARBOUR = (
    "The ferry to the island leaves the old harbour every morning at seven. It carries forty "
    "passengers, six bicycles and the mail. In winter the crossing takes an hour, because the "
    "captain keeps close to the coast; in summer it takes forty minutes. Tickets are sold on "
    "board, and children under six travel free of charge."
)
_GARDEN = (
    "Anna and her neighbour share a small garden behind the house. They grow tomatoes, beans and "
    "three kinds of lettuce. Last spring a late frost killed the young tomatoes, so this year they "
    "wait until May before they plant them. The neighbour waters the beds in the morning, and Anna "
    "pulls the weeds in the evening."
)
_CODE = """def total_price(items, discount):
    total = 0
    for item in items:
        price = item["price"] * item["count"]
        if item["count"] > 10:
            price = price * (1 - discount)
        total = total + price
    return total"""
_LIST = (
    "name: Lena, city: Graz, age: 31\nname: Omar, city: Tunis, age: 27\n"
    "name: Mei, city: Suzhou, age: 45\nname: Pavel, city: Brno, age: 38\n"
    "name: Ines, city: Porto, age: 52"
)
_MINUTES = (
    "The meeting began at nine. Ruth reported that the new printer arrived, but that its cable is "
    "missing. Karl will order a cable today. The team agreed to move the weekly meeting from "
    "Monday to Tuesday. Ruth asked who will water the plants in August; Karl offered to do it. The "
    "meeting ended at half past nine."
)

EDIT: tuple[str, ...] = (
    f"Repeat the following text word for word.\n\n{_HARBOUR}",
    f"Rewrite this text. Change the ferry to a bus and keep the rest as it is.\n\n{_HARBOUR}",
    f"Put this text into the past tense and change nothing else.\n\n{_GARDEN}",
    f"Summarise the following text in two sentences, in its own words.\n\n{_GARDEN}",
    f"Rename the variable `total` to `amount` in this code and print all of it.\n\n{_CODE}",
    f"Add a comment above each line of this code and print all of it.\n\n{_CODE}",
    f"Sort these lines by age and print them again.\n\n{_LIST}",
    f"Make a list of what was decided, quoting the minutes.\n\n{_MINUTES}",
)

KINDS = {"chat": CHAT, "edit": EDIT}
