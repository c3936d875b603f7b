"""The built-in text of a report, and the reading of a text from a file.

The built-in text is prose whose names and figures come back much later, so that attention must find
them far back. A table, a recipe and a little code are in it, so that not only one kind of text
counts.
"""

from __future__ import annotations

from pathlib import Path

from batchkv_worker.errors import SettingsError

BUILT_IN = "built in"


def read_text(file: Path | None) -> tuple[str, str]:
    """(name of the text, the text); raises SettingsError for a file without usable text."""
    if file is None:
        return BUILT_IN, SAMPLE
    try:
        text = file.read_text("utf-8")
    except UnicodeDecodeError as fault:
        raise SettingsError(f"--text {file}: the file is not UTF-8 text") from fault
    except OSError as fault:
        reason = fault.strerror or type(fault).__name__
        raise SettingsError(f"--text {file}: the file cannot be read: {reason}") from fault
    if not text.strip():
        raise SettingsError(f"--text {file}: the file has no text")
    return file.name, text


SAMPLE = """\
The Ferry at Orlan Sound

When the bridge at Orlan Sound was closed for the third winter in a row, the council asked Ida \
Brekke to run the old ferry again. She was fifty-eight, had spent thirty years repairing \
engines, and owned the only license in the district that still covered vessels of that class. \
The ferry was called the Marten. It had been built in 1931 to carry eleven cars and ninety \
people, and it had lain under a tarpaulin behind the cannery since the bridge was opened.

Ida looked at the hull first. The plates below the waterline were sound, which surprised her, \
but the frames behind the engine had rusted to the thickness of a biscuit. She wrote a list on \
the back of a tide table and gave it to Anton Reyes, who kept the shipyard's store. "Nine \
frames," she said. "Two pumps, because one of them will fail. A new shaft seal. And paint, the \
cheap kind, as much as you have." Anton had forty liters of green and some tins of a red that \
nobody had ever ordered. That is why the Marten, which had been white for all its life, came out \
of the shed in March with a green hull and a red funnel.

The engine was another matter. It was a four-cylinder diesel from a factory that no longer \
existed, in a town that had since changed its name. Ida took it apart on the floor of the \
cannery, washed every part in paraffin and laid the parts out in the order in which she had \
found them. On the second day she discovered that the third piston was not from this engine at \
all. Somebody had turned it down by hand to fit, long ago, and had scratched his initials into \
the crown: T. V., 1944. She measured it, found it truer than the other three, and put it back.

The first crossing was on the ninth of April. The sound is four kilometers wide at that point, \
and the current runs north for seven hours and south for five, because of the shape of the basin \
above it. A stranger who aims at the far landing will arrive half a kilometer from it. Ida's \
nephew Jonas, who had been made deckhand because he was the only one in the family who was never \
seasick, stood at the bow with a pole and called out the depth at the bar: three meters, two and \
a half, two and a half, four. There were six cars on board, a van with bread, and a school class \
that had been promised seals. The crossing took twenty-six minutes. They saw no seals.

By the summer the ferry ran eight times a day. The timetable hung in the window of the bakery, \
written by Ida in capital letters, and it was the only thing in the district on which everybody \
agreed.

    Crossing   Leaves Orlan   Leaves Kvam   Fare, car   Fare, person
    1          06:10          06:50         140         22
    2          07:30          08:10         140         22
    3          09:00          09:40         120         18
    4          11:15          11:55         120         18
    5          13:30          14:10         120         18
    6          15:45          16:25         140         22
    7          17:20          18:00         140         22
    8          20:00          20:40         100         15

People who had not spoken to each other for years stood side by side at the rail, because there \
was nowhere else to stand. The doctor from Kvam, Mrs. Sandoval, held her surgery in the saloon \
on the first crossing of every Tuesday. The librarian left a box of books beside the life \
jackets; whoever took one brought another. A man who lived alone on the island of Hest, and who \
was known for having once thrown a tax inspector into the harbor, turned out to play the \
concertina. He played on the last boat on Fridays, and would take no money for it, but he \
accepted bread.

In August a journalist came from the city to write about the closing of the bridge. He asked Ida \
whether it was not a shame that a modern country should have to go back to such a thing. She \
thought about it for the whole length of the crossing. "The bridge saved us twenty minutes," she \
said when they had tied up. "I have been trying to remember what we did with them."

What she told Jonas, later, was more practical. A bridge is either open or closed, and when it \
is closed there is nothing that anybody in Orlan can do. A ferry is always a little bit broken. \
The injectors clog, the ramp jams, a pump fails, and then the other pump has to do, and each of \
these can be mended by a person with a wrench who has been shown how. She began to show him. He \
learned to hear, through the soles of his boots, which cylinder was running cold. He learned \
that the gauge for the oil pressure read two bars too high and had done so since before he was \
born. He kept a log, and because he liked such things he wrote a small program that warned him \
of trouble:

    def warnings(log, limit=3):
        \"\"\"Days on which a reading was far from the usual one.\"\"\"
        usual = sum(day.pressure for day in log) / len(log)
        found = []
        for day in log:
            if abs(day.pressure - usual) > limit:
                found.append((day.date, day.pressure))
        return found

In its first month the program warned of one day only, the fourteenth of September. Jonas was \
proud of it until Ida pointed out that on the fourteenth of September the engine had not been \
running, since the whole crew had been at a wedding. He changed the program so that days without \
a crossing did not count.

The wedding was that of Anton Reyes, who married the librarian. The soup was for two hundred, \
and because so many asked for it afterwards the recipe went up in the window of the bakery, next \
to the timetable. For ten people take two kilograms of white fish, a kilogram of potatoes, four \
leeks, a fennel bulb, a liter and a half of stock, three deciliters of cream, a spoon of mustard \
and the rind of a lemon. Cut the potatoes small and boil them in the stock until they can be \
crushed with a fork; crush a third of them, so that the soup thickens. Soften the leeks and the \
fennel in butter without letting them brown, and add them. Put in the fish in large pieces, take \
the pot off the fire at once, and leave it covered for eight minutes. Stir in the cream, the \
mustard and the lemon last. For two hundred people, multiply everything by twenty, except the \
lemon: six are enough.

The bridge was opened again in the following spring, with a speech and a ribbon. The minister \
thanked the engineers. On the first day more than a thousand cars drove over it, and the Marten \
carried two, both by mistake. Ida tied up at Orlan at noon, shut down the engine, and listened \
to it cool. Then she walked up to the council and put a sheet of paper on the table. It was an \
account of the whole time, and it was one page long.

The ferry had made 2,704 crossings in 338 days. It had carried 18,930 cars and 96,411 people, \
four horses, one piano, and a bull that belonged to the man from Hest. It had missed eleven \
crossings: five because of fog, three because of the ramp, two because a pump had failed while \
the other was being mended, and one because of a wedding. Nobody had been hurt. The fares had \
paid for the fuel, the wages and the paint, and there remained a sum of 41,250, which she \
proposed to spend on a new ramp, "since the bridge will be closed again."

The council discussed this for two hours. One member said that the bridge was now guaranteed for \
fifty years. Another said that it had been guaranteed for fifty years before. In the end they \
voted, seven to four, to keep the ferry in service on one day of the week, so that somebody \
would always know how. They asked Ida which day she wanted. She said Friday, on account of the \
concertina.

Questions for the reader, and their answers

What was the ferry called, and when was it built? It was called the Marten, and it was built in \
1931. How many cars could it carry? Eleven cars, and ninety people. Who repaired it? Ida Brekke, \
who had spent thirty years repairing engines. Who kept the shipyard's store? Anton Reyes, who \
later married the librarian. Which colors did the Marten have when it came out of the shed? A \
green hull and a red funnel. What was scratched into the third piston? The initials T. V. and \
the year 1944. How long did the first crossing take? Twenty-six minutes. What had the school \
class been promised? They had been promised seals, and they saw none. When did the sixth \
crossing leave Orlan? At 15:45, and it left Kvam at 16:25. What did a car pay on the eighth \
crossing? It paid 100, and a person paid 15. Who held her surgery in the saloon? Mrs. Sandoval, \
the doctor from Kvam, on the first crossing of every Tuesday. What did the man from Hest play? \
He played the concertina, on the last boat on Fridays. Of which day did the first program warn, \
and why was it wrong? Of the fourteenth of September, when the engine had not been running \
because the crew had been at a wedding. How much white fish does the soup need for ten people? \
Two kilograms. How many lemons does it need for two hundred? Six. How many crossings did the \
ferry make, and in how many days? It made 2,704 crossings in 338 days. How many did it miss \
because of fog? Five. How much money remained? A sum of 41,250, for a new ramp. How did the \
council vote? Seven to four, to keep the ferry on one day of the week. Which day was it, and \
why? It was Friday, on account of the concertina.
"""
