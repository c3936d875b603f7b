const int GROUP_X = threadgroup_position_in_grid.x;
const int GROUP_Y = threadgroup_position_in_grid.y;
const int GROUP_Z = threadgroup_position_in_grid.z;
const int GROUPS_X = threadgroups_per_grid.x;
const int GROUPS_Y = threadgroups_per_grid.y;
const int GROUPS_Z = threadgroups_per_grid.z;
const int THREAD_X = thread_position_in_threadgroup.x;
