// One more than each number that is given.
found[THREAD_X] = given[THREAD_X] + 1;
