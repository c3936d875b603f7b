"""The words of the demo: keys of the ledgers, and everyday English for the tokenizer and filler.

`ADJECTIVES` x `NOUNS` name the facts of a ledger (16,384 keys). Each of them is one token of the
demo's vocabulary, so that a fact costs the same number of tokens whatever its key.
"""

ADJECTIVES: tuple[str, ...] = tuple(
    """
    amber ancient autumn bitter black blue bold brave bright brisk broad bronze brown calm careful
    cheerful clear clever cold cool copper coral crimson crisp curious dark deep dusty eager early
    eastern empty faint fair famous fast fierce fine firm fresh friendly frosty gentle giant glad
    golden grand gray great green happy hidden high hollow honest humble icy iron ivory keen kind
    large lazy light little lively lonely long loud low lucky marble mellow merry mighty misty
    modest narrow neat new noble northern old olive orange pale patient pink plain polite proud
    pure purple quick quiet rapid rare red rich round royal rusty sandy scarlet secret sharp shiny
    short silent silver simple slow small smooth soft solid southern steady stormy strong summer
    sunny sweet swift tall tender tidy tiny
    """.split()  # noqa: SIM905 - a column of quoted words would hide them
)

NOUNS: tuple[str, ...] = tuple(
    """
    acorn anchor apple arrow badger barn basket beacon bear beaver bell bench bird boat book bottle
    bridge brook bucket cabin camel candle canyon castle cat cedar chair cherry cliff clock cloud
    clover comet crane creek crow crown daisy deer desert dolphin door dove dragon drum duck eagle
    falcon farm feather field flag flame flute forest fox frog garden gate glove goose grape hammer
    harbor hawk heron hill horse island jacket kettle key kite ladder lake lamp lantern leaf lemon
    lily lion lizard maple meadow mill mirror moon mountain mouse oak ocean orchard otter owl
    parrot path peach pebble pigeon pine planet plum pond rabbit raven ribbon river robin rocket
    rose sail salmon shell ship sparrow spoon star stream swan table tent tiger tower trail tree
    tulip turtle valley
    """.split()  # noqa: SIM905
)

NAMES: tuple[str, ...] = tuple(
    """
    James Maria John Anna Tom Sarah Mike Lisa David Emma Peter Julia Mark Kate Sam Laura Ben Mary
    Jack Amy Alex Nina Carlos Rosa Henry Alice George Lucy Robert Helen Daniel Grace Kevin Susan
    Brian Janet Jerry Betty Eric Wendy Toby Tina Jason Karen Frank Linda Josh Claire Adam Ella Paul
    Rachel Tim Jenny Bob Jane Mr Mrs Ms Dr
    """.split()  # noqa: SIM905
)

# Most frequent first: the place in the list sets how often the tokenizer's corpus repeats a word.
COMMON: tuple[str, ...] = tuple(
    """
    the of and to a in is that for it was on are with as he be at by she his this have from or had
    not but they her which you one all were there we has will an their each if how do what many
    much would than more then when who so can said them some time could into its only other two no
    been out up about my first did him also any people may after these your most made over such
    through even back down before must well should because very still between being under where
    both same another while last might us great own since work part against take during without
    again place every years three few now day per total left money cost costs does dollars number
    half twice times cents hours hour minutes minute week weeks month months year days spend
    spends spent buy buys bought sell sells sold pay pays paid give gives gave given make makes
    earn earns earned need needs needed want wants wanted get gets got goes go went find found have
    start started end ended eat eats ate drink run runs ran walk walks walked drive drives drove
    read reads write writes wrote use uses used save saves saved answer question price prices
    amount feet foot inch inches miles mile pounds pound gallons gallon percent equal more less
    fewer older younger longer shorter taller rest remaining together altogether average rate speed
    distance area length width height weight sum difference product ratio fraction double triple
    quarter third dozen pair pairs box boxes bag bags piece pieces group groups row rows set sets
    class school student students teacher teachers child children boy boys girl girls man men woman
    women friend friends mother father mom dad brother brothers sister sisters son daughter family
    house home room store shop market office bank park city town street car cars bus train bike
    boat plane road trip dog dogs cat cats fish bird birds cow cows horse horses chicken chickens
    egg eggs milk bread cake cakes cookie cookies pie pizza pizzas slice slices candy apple apples
    orange oranges banana bananas lemon lemons fruit vegetables potato potatoes tomato tomatoes
    rice meat cheese butter sugar flour water juice coffee tea cup cups bottle bottles glass glasses
    plate plates bowl table chair bed door window floor wall paper papers page pages book books
    pen pens pencil pencils notebook letter letters card cards game games ball balls toy toys doll
    dolls team teams player players score scored point points win won lose lost race shirt shirts
    shoe shoes dress pants hat hats coat ticket tickets movie music song video phone computer
    flower flowers tree trees plant plants planted garden farm field seeds leaf leaves stone stones
    sun moon star stars sky rain snow wind fire river lake sea mountain island beach forest
    morning afternoon evening night today tomorrow yesterday noon Monday Tuesday Wednesday Thursday
    Friday Saturday Sunday January February March April June July August September October November
    December spring summer fall winter calculate determine solve total cost solution equation
    problem problems step steps value values result results follows therefore first second third
    fourth fifth next finally show think know knows knew known see sees saw seen look looks looked
    come comes came bring brings brought keep keeps kept put puts let lets say says tell tells told
    ask asks asked call calls called try tries tried help helps helped play plays played work works
    worked live lives lived move moves moved turn turns turned hold holds held stand stands stood
    leave leaves leaving become becomes became begin begins began seem seems feel feels felt carry
    carries carried open opens opened close closes closed learn learns learned study studies studied
    teach teaches taught build builds built grow grows grew cut cuts fill fills filled pick picks
    picked pack packs packed share shares shared split divide divided multiply multiplied add adds
    added subtract subtracted count counts counted collect collects collected receive receives
    received charge charges charged finish finishes finished complete completed order orders ordered
    visit visits visited travel travels traveled sleep sleeps slept wash clean cook cooks cooked
    bake bakes baked paint paints painted draw draws drew sing watch watches watched listen wait
    wear wears wore catch catches caught throw throws threw hit fly flies flew swim swims swam ride
    rides rode fix hand hands head face eye eyes foot arm leg heart body mind voice word words name
    names life world country state government company business job jobs worker workers boss
    customer customers service salary wage wages bonus tax taxes tip discount sale profit loss
    interest account budget bill bills cash coin coins penny pennies nickel nickels dime dimes
    quarters dollar cent large small big little long short high low old young new good better best
    bad worse worst right wrong early late fast slow hard easy hot cold warm cool full empty clean
    dirty heavy light dark bright rich poor happy sad angry tired busy free ready sure true false
    real whole single different similar important possible enough several certain general special
    common local public private red blue green yellow white black brown pink purple gray exactly
    almost already always never often sometimes usually once again soon later ago away far near
    here there everywhere together alone around across along behind beside above below inside
    outside within toward towards upon off until unless although though however instead rather
    quite just really actually probably perhaps maybe please thank thanks yes ok hello one two
    three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
    seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred
    thousand million I me mine our ours yours theirs himself herself itself themselves myself
    yourself something anything nothing everything someone anyone everyone nobody whose whom why
    I'm don't doesn't didn't can't isn't it's that's let's won't
    """.split()  # noqa: SIM905
)

LESS_COMMON: tuple[str, ...] = tuple(
    """
    able accept accident across act action activity actor actual adult advice affect afraid age
    agree air airport allow allowance alphabet amazing animal animals apartment appear approach
    argue army arrange arrive arrived art article artist attack attempt attend aunt author available
    baby bacon bakery balance balloon balloons band barrel base baseball basic basketball bath
    battery beautiful beauty bedroom beef believe belong belt benefit berries bicycle birthday
    block blocks blood board bone border bored borrow borrowed bottom bracelet bracelets brain
    branch break breakfast breath bridge bring brush bucket building buildings burger burgers bush
    button cabinet cable cage calendar camera camp candle candles captain carrot carrots case
    cause ceiling cell center central century cereal chain chance change changed chapter character
    chart cheap check chess chest chief chocolate choice choose chose chosen church circle citizen
    clay clear climb cloth clothes cloud club coach coast collection college color colored colors
    column comfort comic compare competition concert condition connect consider consist contain
    contains content contest continue control cookies copy corn corner correct cotton couch couple
    course court cousin cover crayon crayons cream create crop cross crowd culture cupcake cupcakes
    current curve customer cycle daily damage dance danger data date deal dear death debt decide
    decided decrease decreased degree degrees deliver delivered delivery deposit describe design
    desk detail develop diameter dictionary diet dinner direct direction disease dish dishes display
    distribute doctor document donate donated doubt dream drop dropped dry due earth east edge
    education effect effort electric element elephant employee employees energy engine engineer
    enjoy enter entire entry equally event events evidence example exam exams excited exercise
    exist expect expected expense expenses expensive experience experiment explain express extra
    fabric fact factor factory fail family fan farmer farmers fear feed fee feeling female fence
    festival fight figure file film final fit flight flow focus folder follow following food
    football force forget form former forward frame fraction free freedom freezer fresh fridge
    front fuel fun fund funny furniture future gain gallery gas gather gift gifts glue goal goat
    goats gold golf government grade grades grain gram grams grandfather grandma grandmother
    grandpa grass ground growth guard guess guest guests guide guitar gym habit hair hall happen
    happened health hear heard heat helmet history hobby hole holiday honey hope hospital hotel
    huge human hundreds hungry hurt husband idea identify ill image imagine improve include
    included including income increase increased increases individual industry information
    ingredients insect instrument interior introduce invest investment invite invited island item
    items jar jars jewelry join joined joke jump jumped kick kids kilogram kilograms kilometer
    kilometers kitchen knee knife lady lamp land language lap laps laundry law lawn lawyer lay lead
    leader league least leather lecture legal lemonade level library lie lift limit line lines
    liquid list liter liters load loan locate lock log lots love lunch machine machines magazine
    magazines mail main maintain major male manage manager map marble marbles mark marker market
    married mass match material math matter meal meals mean means meant measure measured medal
    medicine meet meeting meets member members memory mention menu message met metal meter meters
    method middle mile military milk mind mix mixed mixture model modern moment monthly mouth muffin
    muffins museum narrow nation natural nature nearly neck necklace neighbor neighbors neither
    nest net network news newspaper nice noise normal north nose note notice numbers nurse nut nuts
    object occur ocean offer offers officer oil onion onions online operate opinion opposite option
    organize original others oven owe owes owner owns oxygen package packages packet packets paid
    paintings pan parent parents particular partner party pass passed passengers past path pattern
    pay payment peace peaches pencils pension pepper perform perimeter period person personal pet
    pets photo photos physical piano picture pictures pile pillow pilot pipe pitch plan planned
    planning plastic player pleasure plenty plus pocket poem poetry police policy political pool
    popular population position positive post posters pot pots powder power practice practiced
    prepare prepared present presents president press pressure pretty prevent previous print printed
    prize prizes process produce produced produces product products program project promise
    property protect prove provide pull pumpkin purchase purchased purchases purpose push puzzle
    puzzles quality quantity quarter quickly radio radius raise raised range reach reached reaction
    reader reason record recipe rectangle rectangular reduce reduced refrigerator refuse regular
    relation religion remain remained remains remember remove removed rent repair repeat replace
    report represent request require required requires research respect respond responsible
    restaurant return returned reward ribbon ring rings rise rock role roll rolls roof rope rose
    roses roughly route rule rules safe sail salad salt sample sand sandwich sandwiches scale scene
    schedule science scientist screen season seat seats section secret seed send sends sense sent
    sentence separate series serious serve served serves servings settle several shape sheep sheet
    sheets shelf shelves ship shirts shock shoot shopping shore shoulder shout shower side sides
    sign silver similar singer sink sit site situation size skill skin skirt smile smoke soap
    social society sock socks soda sodas soil soldier solve sound soup source south space speak
    spider spoke sport sports spot spread square squares staff stage stairs stamp stamps standard
    station stay stayed steak steel stick stickers stop stopped story stories strange straw
    strawberries strength stretch string strong structure style subject success sudden suddenly
    suggest suit supply support suppose surface surprise sweater system tail talk talked tank tape
    task taste team tennis term test tests text theater theory thick thin thing things thought
    thousands throughout tie tiles tire tires title toe tool tools tooth top topic tour tower
    traffic trail trainer training transport treat trial triangle trouble truck trucks trust truth
    type types umbrella uncle uniform unit units university unusual upper usual vacation van various
    vase vehicle vehicles version view village volume volunteer vote walls war weak wealth weapon
    weather wedding weekday weekdays weekend weekends weekly weigh weighs west wheel wheels wide
    wife wing winner wish wonder wood wooden wool worry worth yard yards yellow zero zoo
    accuracy adjust algorithm array assume batch cache chain check code constant define depth digit
    digits domain error estimate exact expression formula function graph index input integer key
    label ledger let limit list log map matrix maximum mean median memory minimum model negative
    node notation output parameter plane positive power prime probability proof prompt query random
    record root sequence server simplify slope square string subset symbol table theorem token tool
    user variable vector vertex
    """.split()  # noqa: SIM905
)

SUFFIXES: tuple[str, ...] = tuple(
    """
    s es ed d ing er ers est ly y ion ions tion ation ment ness ful less able al ous ive ity
    re un in dis pre en th
    """.split()  # noqa: SIM905
)
