const int GROUP_X = blockIdx.x;
const int GROUP_Y = blockIdx.y;
const int GROUP_Z = blockIdx.z;
const int GROUPS_X = gridDim.x;
const int GROUPS_Y = gridDim.y;
const int GROUPS_Z = gridDim.z;
const int THREAD_X = threadIdx.x;
