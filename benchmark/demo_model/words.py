"""Built-in list of common English words from which the demo questions are made.

`tasks.py` reads `COMMON_WORDS` for the word questions and for the sentences to repeat.  The list
was written for this project, is plain lower-case ASCII, and must never be reordered by a program:
seeded draws depend on its order.
"""

from __future__ import annotations

_TEXT = """
able about above across act add age ago air all alone along also always among and angle animal
answer any apple april arm army art ask aunt autumn away baby back bag ball banana band bank bar
base basket bath beach bean bear beat bed bee before begin bell below belt bench best better big
bird bit black blade blank block blood blow blue board boat body bone book boot bottle bottom bowl
box boy branch brave bread break brick bridge bright bring broad broken brother brown brush build
bus busy butter button cabin cake call calm camera camp can candle candy car card care carpet carry
castle cat catch chain chair chalk chance cheese chest chicken child circle city class clay clean
clear clever clock close cloth cloud coat coffee coin cold color come cook cool copper corn corner
cotton count country cover cow cream cross crowd crown cup curtain cut dance dark daughter day deep
deer desert desk dinner dirt dish doctor dog door down draw dream dress drink drive drop dry duck
dust eagle early earth east easy eat edge egg eight elbow empty end engine enjoy enter evening
every eye face fall family famous far farm fast father feather fence field fight find finger fire
first fish five flag flame flat floor flour flower fly fog follow food foot forest fork forty
forward four fox free fresh friend frog front frost fruit full funny game garden gate gentle ghost
giant gift girl give glad glass glove goat gold good grape grass gray great green ground group grow
guess guitar hair half hall hammer hand happy hard hat have head hear heart heat heavy help here
hill hold hole holiday home honey hope horn horse hot hotel hour house hungry ice idea inch ink
insect iron island jacket jam jar jewel job join joke journey juice july jump june jungle keep
kettle key kick kind king kitchen kite knee knife ladder lady lake lamp land language large late
laugh leaf learn leather left leg lemon letter lettuce level library light lily line lion lip list
listen little live lock long look loud love low lucky lunch machine magic mail many map march
market mask math meadow meal meat medal meet melon metal middle milk mind minute mirror money
monkey month moon morning moss mother motor mountain mouse mouth move movie much music nail name
narrow near neck needle nest never new news night nine noise noon north nose note number nurse oak
ocean office often oil old olive once one onion open orange orchard order other oven over owl page
paint pair palace pan paper parent park part party past path peace peach pear pen pencil people
pepper piano picture pie pig pillow pilot pink place plain plane planet plant plate play pocket
poem point pond pony poor potato powder present pretty price prince proud pull pumpkin puppy purple
push queen question quick quiet rabbit race radio rain read ready red rest rice rich ride right
ring ripe river road robin rock roof room root rope rose round row rubber rug rule run sad safe
sail salad salt sand scarf school science sea season seat second see seed seven shade shadow shape
sharp sheep shelf shell ship shirt shoe shop short shoulder shout show silent silk silver simple
sing sister six skin sky sleep slow small smart smell smile smoke smooth snail snake snow soap
soccer sock soft soldier some son song soon soup south space spare spider spoon sport spring square
stage stairs stamp star station stay steam steel step stick still stone stop storm story stove
strange straw stream street string strong student sugar summer sun supper sweet swim table tail
talk tall tape taste tea teacher team tent thick thin thing third thirty three throat thumb thunder
ticket tiger time tin tired toast today toe tomato tongue tooth top torch touch towel tower town
toy trade train travel tree trip trouble truck true trumpet trunk try tulip tunnel turkey turn
turtle twelve twenty two uncle under use valley vase velvet very village violin visit voice wagon
wait walk wall walnut want warm wash watch water wave wax weather week west wet whale wheat wheel
white wide wild wind window wine wing winter wise wolf woman wonder wood wool word work world
write yard year yellow yes young zebra zero
"""

COMMON_WORDS: tuple[str, ...] = tuple(_TEXT.split())
